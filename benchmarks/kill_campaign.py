"""Kills learners again and again: `python -m benchmarks.kill_campaign --kills 500 [--minutes 60]`.

Each run is a real learner with a real training rank on a very small model, over gRPC with a worker
that keeps its own record of receipts. It is killed with SIGKILL until it completes; then an
undisturbed process trains its steps again from the journaled plans. Kinds of kills:

- `call`: at one write, fsync, rename, creation or removal of a file of a checkpoint or of the
  journal, by strace (skipped, with a warning, if strace may not trace);
- `moment`: before or after the start, a training step, a publication, a checkpoint of the rank;
- `time`: at a random time;
- `process`: in whole runs of `flotilla train` (`--full`), of the learner, its rank, or both.

With `--policy vision` the policy sees pictures and its tower is trained; whole runs then have a
real vLLM, which is killed, too, or its worker.

The last line is one JSON object: `kills`; `lost`, acknowledged trajectories that the journal lacks
or has with other content; `twice`, attempts in more than one step; `bit_equal`, whether every run's
parameters and optimizer state are bit-equal to those of the undisturbed one; `books_hold`, whether
acknowledged = trained + evaluated + failed + dropped + queued in every journal; `runs`,
`acknowledged`, `minutes`, `seed`, and `points`, the number of kills by point. The exit code is 1 if
any check fails.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.faults.kills.fork_server import ForkServer, fork_server
from tests.faults.kills.full_run import TEXT, VISION, FullRun
from tests.faults.kills.killed_run import KilledRun, Verdict, random_death
from tests.faults.kills.strace import why_not

# Number of kills after which a run may complete.
PER_RUN = 25
STEPS = 12
TARGETS = {"lost": 0, "twice": 0, "bit_equal": True, "books_hold": True}


@dataclass(slots=True)
class Totals:
    """Totals of all runs."""

    kills: Counter[str] = field(default_factory=Counter[str])
    points: Counter[str] = field(default_factory=Counter[str])
    runs: int = 0
    lost: int = 0
    twice: int = 0
    acknowledged: int = 0
    bit_equal: bool = True
    books_hold: bool = True

    def add(self, verdict: Verdict, points: Counter[str]) -> None:
        self.runs += 1
        self.points += points
        self.lost += verdict.lost
        self.twice += verdict.twice
        self.acknowledged += verdict.books.acknowledged
        self.bit_equal &= verdict.bit_equal
        self.books_hold &= verdict.books.holds

    def figures(self, seed: int, seconds: float) -> dict[str, Any]:
        return {
            "kills": self.kills.total(),
            "lost": self.lost,
            "twice": self.twice,
            "bit_equal": self.bit_equal,
            "books_hold": self.books_hold,
            "runs": self.runs,
            "acknowledged": self.acknowledged,
            "minutes": round(seconds / 60, 1),
            "seed": seed,
            "kinds": dict(self.kills),
            "points": dict(self.points.most_common()),
        }


class Campaign:
    """Series of runs, until there were enough kills or the time is up."""

    def __init__(self, wanted: argparse.Namespace, folder: Path, progress: Progress) -> None:
        self.totals = Totals()
        self._wanted = wanted
        self._folder = folder
        self._chooser = random.Random(wanted.seed)
        self._ends = time.monotonic() + 60 * wanted.minutes
        self._progress = progress
        self._bar = progress.add_task("kills", total=wanted.kills)
        self._kinds = ["time", "moment", "call", "call"]

    async def run(self) -> None:
        if problem := why_not():
            print(f"warning: no kills at system calls: {problem}", file=sys.stderr)
            self._kinds = ["time", "moment"]
        for number in range(self._wanted.full):
            await self._full(number)
        async with fork_server() as server:
            model = self._folder / "model"
            model.mkdir()
            command = "vision-model" if self._wanted.policy == "vision" else "model"
            await server.run(command, {"folder": model}, self._folder / "model.log")
            number = 0
            while self._goes_on():
                await self._small(server, model, self._folder / f"run-{number}")
                number += 1

    async def _small(self, server: ForkServer, model: Path, folder: Path) -> None:
        run = KilledRun(server, folder, model, STEPS)
        await run.prepare()
        chooser, status = self._chooser, -1
        while status and run.kills.total() < PER_RUN and self._goes_on():
            death = random_death(chooser, run, self._kinds)
            status = await run.start(death, same_worker=chooser.random() < 0.7)
            self._count_kill(run.last_kind if status else None)
        verdict = await (run.finish() if status else run.verdict())
        self._judge_folder(verdict, run.points, folder)

    async def _full(self, number: int) -> None:
        folder = self._folder / f"full-{number}"
        full = FullRun(folder, self._chooser, VISION if self._wanted.policy == "vision" else TEXT)
        verdict = await full.run(self._count_kill)
        self._judge_folder(verdict, full.points, folder)

    def _judge_folder(self, verdict: Verdict, points: Counter[str], folder: Path) -> None:
        self.totals.add(verdict, points)
        if verdict.good:
            shutil.rmtree(folder)
        else:
            kept = Path(tempfile.mkdtemp(prefix="kill-campaign-")) / folder.name
            shutil.move(folder, kept)
            self._progress.console.print(f"[red]{verdict}[/red]\nkept: {kept}")

    def _count_kill(self, kind: str | None) -> None:
        if kind:
            self.totals.kills[kind] += 1
            self._progress.advance(self._bar)

    def _goes_on(self) -> bool:
        return self.totals.kills.total() < self._wanted.kills and time.monotonic() < self._ends


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=60.0, help="end after this time")
    parser.add_argument("--full", type=int, default=1, help="whole runs of `flotilla train`")
    parser.add_argument("--policy", choices=("text", "vision"), default="text")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(argv)
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        campaign = Campaign(wanted, Path(folder), progress)
        asyncio.run(campaign.run())
    figures = campaign.totals.figures(wanted.seed, time.monotonic() - started)
    print(json.dumps(figures))
    return 0 if all(figures[name] == target for name, target in TARGETS.items()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
