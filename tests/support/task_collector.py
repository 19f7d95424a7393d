"""`flotilla data collect`, in processes, on a few tasks of the shipped apps."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_environments.tasks import make_tasks
from tests.support.launcher import forged_command
from tests.support.repository import ROOT

SPEC = ROOT / "deploy/runs/local.toml"
TASKS = tuple(make_tasks(("booking", "tracker", "shop"), "train", 6))
KEYS = [task["key"] for task in TASKS]


@dataclass(frozen=True, slots=True)
class Collector:
    """The command with its tasks and its spec, in a folder."""

    folder: Path
    tasks: Sequence[Mapping[str, Any]] = TASKS
    spec: Sequence[str] = (str(SPEC), "--env_gateway.backend=embedded")

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def words(self, *more: object) -> list[str]:
        tasks = self.folder / "tasks.json"
        tasks.write_text(json.dumps(self.tasks))
        spec, *overrides = self.spec
        given = ("data", "collect", spec, tasks, "--out", self.out, *overrides, *more)
        return ["-m", "flotilla_launcher.cli.app", *map(str, given)]

    def collect(self, *more: object) -> subprocess.CompletedProcess[str]:
        words = self.words(*more)
        return subprocess.run(
            forged_command(*words),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=110,
            check=False,
        )

    def start(self, *more: object) -> subprocess.Popen[str]:
        """Start it in a process of its own, which can be killed."""
        words = self.words(*more)
        return subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / name).read_text().splitlines()]

    def fates(self) -> dict[str, str]:
        return {row["key"]: row["fate"] for row in self.rows("evidence.jsonl")}

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.out / "ledger.sqlite")) as db:
            return db.execute(sql).fetchall()
