"""What an app is made of."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from environments.toolkit import Tool
from environments.words import Names

Row = dict[str, Any]
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Draw:
    """What an app draws for one task.

    `slots` are the words and numbers of the prompt, `targets` the ids that a solution needs, and
    `pair` the two names that decide between training and evaluation.
    """

    slots: dict[str, str | int]
    targets: dict[str, int]
    pair: tuple[str, str]
    tables: dict[str, list[Row]]


@dataclass(frozen=True)
class Scenario(Draw):
    """Everything about a task, as a pure function of environment, data id and data version."""

    env_key: str
    data_id: str
    data_version: str
    kind: str
    prompt: str
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def facts(self) -> dict[str, str | int]:
        """What the verifier may know, by name."""
        return {"kind": self.kind, **self.slots, **self.targets}


@dataclass(frozen=True)
class Kind:
    """A kind of task: its phrasings, and the calls that solve it once the ids are known."""

    phrasings: tuple[str, ...]
    plan: Callable[[Draw], list[Call]]


@dataclass(frozen=True)
class App:
    """An app: its tables (SQL), its tools by name, its kinds of task and how one is drawn."""

    key: str
    schema: str
    tools: Mapping[str, Tool]
    kinds: Mapping[str, Kind]
    draw: Callable[[Names, str, random.Random], Draw]


@dataclass(frozen=True)
class DataApp:
    """An app that only serves data: its databases are fixed, and its tasks come from a file.

    `seed` makes the bytes of a SQLite file from a data id; it raises `ValueError` for one that it
    does not know. A data id has the same database in every data version.
    """

    key: str
    tools: Mapping[str, Tool]
    seed: Callable[[str], bytes]

    def scenario(self, data_id: str, data_version: str) -> Scenario:
        """Names the data; what the task is, the file knows."""
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
