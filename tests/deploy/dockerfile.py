"""Dockerfiles, parsed as far as the tests need."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its arguments, in either of the two notations; for a HEALTHCHECK those of its CMD."""
        text = self.text.partition("CMD ")[2] if self.name == "HEALTHCHECK" else self.text
        return json.loads(text) if text.startswith("[") else text.split()


@dataclass(frozen=True)
class Dockerfile:
    """The instructions of a file by stage."""

    stages: Sequence[Sequence[Instruction]]

    def all(self, name: str) -> list[Instruction]:
        return [each for stage in self.stages for each in stage if each.name == name]

    def last(self, name: str) -> Instruction:
        """The one that counts in the image: the last of the last stage."""
        return [each for each in self.stages[-1] if each.name == name][-1]


def read(path: Path) -> Dockerfile:
    """Parse a Dockerfile without heredocs and escapes."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            stages.append([])
        if name:
            stages[-1].append(Instruction(name, text.strip()))
    return Dockerfile(stages)
