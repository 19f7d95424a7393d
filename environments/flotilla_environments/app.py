"""Parts of an app, and the tasks that it draws."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flotilla_environments.name_lists import Names
from flotilla_environments.toolkit import Tool

Row = dict[str, Any]
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class DrawnTask:
    """A task drawn by an app.

    `slots` are the words and numbers of the prompt, `targets` the ids that a solution needs, and
    `pair` the two names that decide between training and evaluation."""

    slots: dict[str, str | int]
    targets: dict[str, int]
    pair: tuple[str, str]
    tables: dict[str, list[Row]]


@dataclass(frozen=True)
class Scenario(DrawnTask):
    """Everything about a task, as a pure function of environment, data id and data version."""

    env_key: str
    data_id: str
    data_version: str
    kind: str
    prompt: str
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def facts(self) -> dict[str, str | int]:
        """Facts that the verifier may know, by name."""
        return {"kind": self.kind, **self.slots, **self.targets}


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: its phrasings, and the calls that solve it once the ids are known."""

    phrasings: tuple[str, ...]
    plan: Callable[[DrawnTask], list[Call]]


Draw = Callable[[Names, str, random.Random], DrawnTask]


@dataclass(frozen=True)
class App:
    """An app: its tables (SQL), its tools by name, its kinds of task and how one is drawn.

    `other_versions` draws the tasks of data versions other than v1, by their names."""

    key: str
    schema: str
    tools: Mapping[str, Tool]
    kinds: Mapping[str, TaskKind]
    draw: Draw
    modality: str = "tool_use"
    other_versions: Mapping[str, Draw] = field(default_factory=dict[str, Draw])


@dataclass(frozen=True)
class DataApp:
    """An app that only serves data: its databases are fixed, and its tasks come from a file.

    `seed` builds the bytes of a SQLite file from a data id; it raises `ValueError` for an unknown
    one. A data id has the same database in every data version.
    """

    key: str
    tools: Mapping[str, Tool]
    seed: Callable[[str], bytes]

    def make_scenario(self, data_id: str, data_version: str) -> Scenario:
        """Create a scenario that only names the data: the task itself is in the file."""
        return Scenario(
            slots={},
            targets={},
            pair=("", ""),
            tables={},
            env_key=self.key,
            data_id=data_id,
            data_version=data_version,
            kind="data",
            prompt="",
        )
