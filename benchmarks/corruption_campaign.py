"""Damages the files of stopped runs: `python -m benchmarks.corruption_campaign --trials 100`.

A trial takes a copy of a run that was stopped (killed in the middle of a step, or ended between two
starts), damages one of its files, and resumes it with a real learner, a real training rank on a
very small model, and a worker that has kept its own record of receipts. Half of the trials damage
the journal and its write-ahead log, the others take turns at the remaining classes of files, so
that 100 trials visit each at least ten times. Kinds of damage: one flipped bit, a burst of random
bytes, zeros, a torn end, a cut, a removal, and an old copy of the same file from an earlier stop.

Outcomes of a trial:

- `refused`: the learner did not start and named the file. Then either the undamaged file is
  restored and the run must complete as if undamaged, or `accept_loss` is given and the losses must
  be counted.
- `mended`: the run completed with every acknowledged trajectory, none twice, and bit-equal
  parameters to a replay of its plans.
- `counted`: the run completed and reported its losses: `lost_with_disk`, or groups dropped for
  damaged records, with an alarm.
- `silent`: anything else. The trial's folder is kept and printed.

The last line is one JSON object: `trials`, `refused`, `mended`, `counted`, `silent`; then
`restored` and `accepted`, the continuations of refused runs; `files`, the outcomes by class of
file; `minutes` and `seed`. The exit code is 1 when `silent` is not 0.
"""

import argparse
import asyncio
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flotilla_common.run_folder.journal_file import JOURNAL_FILE as JOURNAL
from flotilla_common.run_folder.record_digests import CORRUPT
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.journal.row_codec import count_fates
from flotilla_learner.journal.schema import LOST_WITH_DISK
from tests.faults.kills.fork_server import ForkServer, fork_server, tail
from tests.faults.kills.killed_run import Death, KilledRun

STEPS = 8
# Kills of a run, each copied for trials: in the second training of a start. By time, a fast machine
# would have done all steps.
STOP = Death(moment="train", count=2)
STOPS = 3
# Step at which the run ends on its own, so that its write-ahead log is merged into the journal.
BREAK = 4
DAMAGED_RECORDS = f"dropped/{CORRUPT}"


@dataclass(frozen=True, slots=True)
class Stop:
    """Copy of a run's folder and receipts at one stop."""

    folder: Path
    receipts: Mapping[tuple[str, int, int], bytes]


@dataclass(frozen=True, slots=True)
class Damage:
    """One change to one file."""

    file_class: str
    file: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.file}"


@dataclass(slots=True)
class Totals:
    """Outcomes of all trials."""

    ends: Counter[str] = field(default_factory=Counter[str])
    afterwards: Counter[str] = field(default_factory=Counter[str])
    files: defaultdict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )

    def figures(self, seed: int, seconds: float) -> dict[str, Any]:
        ends = {name: self.ends[name] for name in ("refused", "mended", "counted", "silent")}
        return {
            "trials": self.ends.total(),
            **ends,
            "restored": self.afterwards["restored"],
            "accepted": self.afterwards["accepted"],
            "files": {name: dict(found) for name, found in sorted(self.files.items())},
            "minutes": round(seconds / 60, 1),
            "seed": seed,
        }


def file_classes(run_dir: Path) -> dict[str, list[str]]:
    """Return the files of a stopped run by class, as paths in its folder; absent if it has none."""
    found: dict[str, list[str]] = {}
    names = {
        "journal": [JOURNAL],
        "wal": [f"{JOURNAL}-wal"],
        "shm": [f"{JOURNAL}-shm"],
        "mark": ["journal.mark"],
        "metrics": ["metrics.jsonl"],
    }
    for name, files in names.items():
        there = [file for file in files if (run_dir / file).exists()]
        if there:
            found[name] = there
    checkpoints = sorted(run_dir.glob("checkpoints/step-??????/*"))
    for path in checkpoints:
        name = "tensors" if path.suffix == ".safetensors" else "manifests"
        found.setdefault(name, []).append(str(path.relative_to(run_dir)))
    return found


def flip_bit(data: bytearray, chooser: random.Random) -> None:
    data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)


def overwrite_burst(data: bytearray, chooser: random.Random) -> None:
    start = chooser.randrange(len(data))
    end = min(len(data), start + chooser.choice([8, 64, 512, 4096]))
    data[start:end] = chooser.randbytes(end - start)


def zero_block(data: bytearray, chooser: random.Random) -> None:
    start = chooser.randrange(len(data))
    end = min(len(data), start + chooser.choice([512, 4096]))
    data[start:end] = bytes(end - start)


def tear_end(data: bytearray, chooser: random.Random) -> None:
    """Zero the end, as if the length had been written but not the last blocks."""
    start = max(0, len(data) - chooser.choice([512, 4096, 16384]))
    data[start:] = bytes(len(data) - start)


def cut_end(data: bytearray, chooser: random.Random) -> None:
    del data[chooser.randrange(len(data)) :]


CHANGES: Mapping[str, Callable[[bytearray, random.Random], None]] = {
    "flip": flip_bit,
    "burst": overwrite_burst,
    "zeros": zero_block,
    "torn": tear_end,
    "cut": cut_end,
}
KINDS = (*CHANGES, "removal", "old copy")


def damage_file(damage: Damage, run_dir: Path, older: Path | None, chooser: random.Random) -> bool:
    """Change the file; return False if its content is the same as before."""
    path = run_dir / damage.file
    before = path.read_bytes()
    if damage.kind == "removal":
        path.unlink()
        return True
    if damage.kind == "old copy":
        source = older / damage.file if older else path
        data = source.read_bytes() if source.exists() else before
    else:
        changed = bytearray(before)
        if changed:
            CHANGES[damage.kind](changed, chooser)
        data = bytes(changed)
    path.write_bytes(data)
    return data != before


class Campaign:
    """Trials on copies of stopped runs."""

    def __init__(
        self, server: ForkServer, folder: Path, wanted: argparse.Namespace, progress: Progress
    ) -> None:
        self.totals = Totals()
        self._server = server
        self._folder = folder
        self._model = folder / "model"
        self._wanted = wanted
        self._chooser = random.Random(wanted.seed)
        self._progress = progress
        self._bar = progress.add_task("trials", total=wanted.trials)

    async def run(self) -> None:
        self._model.mkdir()
        arguments = {"folder": self._model}
        await self._server.run("model", arguments, self._folder / "model.log")
        stops = await self._stopped_run()
        for number in range(self._wanted.trials):
            await self._run_trial(number, stops)
            self._progress.advance(self._bar)

    async def _stopped_run(self) -> list[Stop]:
        """Kill one run a few times, let it end early in between, and keep a copy of each stop."""
        run = KilledRun(self._server, self._folder / "original", self._model, STEPS)
        await run.prepare()
        stops: list[Stop] = []
        for _ in range(STOPS):
            await run.start(STOP)
            stops.append(self._copy_run(run, len(stops)))
        run.steps = BREAK
        await run.start(Death())
        stops.append(self._copy_run(run, len(stops)))
        run.steps = STEPS
        for _ in range(STOPS):
            await run.start(STOP)
            stops.append(self._copy_run(run, len(stops)))
        return stops

    def _copy_run(self, run: KilledRun, number: int) -> Stop:
        folder = self._folder / f"stop-{number}"
        shutil.copytree(run.run_dir, folder)
        return Stop(folder, dict(run.receipts))

    def _choose_damage(self, number: int, stops: Sequence[Stop]) -> tuple[int, Damage]:
        """Choose a stop and a damage: the journal or its log in every other trial."""
        chooser = self._chooser
        others = ("mark", "manifests", "tensors", "metrics", "shm")
        wanted = others[number // 2 % len(others)]
        if number % 2 == 0:
            wanted = ("journal", "wal")[number // 2 % 2]
        there = {n: file_classes(stop.folder).get(wanted) for n, stop in enumerate(stops)}
        which = chooser.choice([n for n, files in there.items() if files])
        kind = chooser.choice(KINDS)
        return which, Damage(wanted, chooser.choice(there[which] or []), kind)

    async def _run_trial(self, number: int, stops: Sequence[Stop]) -> None:
        while True:
            which, damage = self._choose_damage(number, stops)
            stop, older = stops[which], stops[which - 1].folder if which else None
            run = self._make_resumable(number, stop)
            if damage_file(damage, run.run_dir, older, self._chooser):
                break
            shutil.rmtree(run.folder)
        try:
            end, reason = await self._judge_run(run, stop, damage)
        except (AssertionError, TimeoutError, sqlite3.Error) as error:
            # Neither an end nor a refusal: the learner hung, or left unreadable files.
            end, reason = "silent", f"{type(error).__name__}: {error}"
        self.totals.ends[end] += 1
        self.totals.files[damage.file_class][end] += 1
        if end != "silent":
            shutil.rmtree(run.folder)
            return
        kept = Path(tempfile.mkdtemp(prefix="corruption-campaign-")) / run.folder.name
        shutil.move(run.folder, kept)
        text = f"[red]silent[/red]: {damage} (stop {which}): {reason}\nkept: {kept}"
        self._progress.console.print(text)

    def _make_resumable(self, number: int, stop: Stop) -> KilledRun:
        run = KilledRun(self._server, self._folder / f"trial-{number}", self._model, STEPS)
        run.folder.mkdir()
        run.make_pipe()
        shutil.copytree(stop.folder, run.run_dir)
        run.receipts.update(stop.receipts)
        return run

    async def _judge_run(self, run: KilledRun, stop: Stop, damage: Damage) -> tuple[str, str]:
        """Resume the damaged run; return its outcome, and the reason if it is `silent`."""
        status = await run.start(Death(), may_fail=True)
        if status == 0:
            return await self._judge_end(run)
        output = tail(run.log)
        if Path(damage.file).name not in output:
            return "silent", f"ended with {status} without naming the file:\n{output[-1500:]}"
        problem = await self._after_refusal(run, stop, damage)
        return ("silent", problem) if problem else ("refused", "")

    async def _judge_end(self, run: KilledRun) -> tuple[str, str]:
        with closing(sqlite3.connect(run.run_dir / JOURNAL)) as db:
            fates = count_fates(db)
            rows = db.execute(
                "SELECT group_id, attempt_index, try, content_digest FROM trajectories"
            )
            journaled = {(group, index, n): digest for group, index, n, digest in rows}
        missing = sum(journaled.get(key) != sent for key, sent in run.receipts.items())
        reported = fates.get(LOST_WITH_DISK, 0) + fates.get(DAMAGED_RECORDS, 0)
        if missing > fates.get(LOST_WITH_DISK, 0):
            return "silent", f"{missing} acknowledged are not in the journal, which has {fates}"
        if reported:
            return "counted", ""
        problem = await self._find_problem(run)
        return ("silent", problem) if problem else ("mended", "")

    async def _find_problem(self, run: KilledRun) -> str:
        """Return the defect of a completed run; empty if it has none.

        A recreated journal has no attic with the arrays of its trained steps, so they cannot be
        replayed: only its books are checked.
        """
        with closing(sqlite3.connect(run.run_dir / JOURNAL)) as db:
            books = audit_journal(db)
            sql = "SELECT 1 FROM sqlite_master WHERE name = 'attic'"
            if db.execute(sql).fetchone() is None:
                return "" if books.holds else str(books)
        verdict = await run.verdict()
        return "" if verdict.good else str(verdict)

    async def _after_refusal(self, run: KilledRun, stop: Stop, damage: Damage) -> str:
        """Follow the refusal's advice; return the problem, empty if that succeeds."""
        if self._chooser.random() < 0.5:
            shutil.copy(stop.folder / damage.file, run.run_dir / damage.file)
            status = await run.start(Death(), may_fail=True)
            if status:
                return f"refused, restored, and then ended with {status}:\n{tail(run.log)[-1500:]}"
            self.totals.afterwards["restored"] += 1
            problem = await self._find_problem(run)
            return problem and f"refused, restored, and then {problem}"
        command = (
            sys.executable,
            "-m",
            "flotilla_learner.checkpoints.accept_loss_command",
            str(run.run_dir),
        )
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output = (await process.communicate())[0].decode()
        if process.returncode:
            return f"refused, and the loss could not be accepted:\n{output[-1500:]}"
        status = await run.start(Death(), may_fail=True)
        if status:
            return f"refused, accepted, and then ended with {status}:\n{tail(run.log)[-1500:]}"
        end, reason = await self._judge_end(run)
        self.totals.afterwards["accepted"] += 1
        return f"refused, accepted, and then {reason}" if end == "silent" else ""


async def run_campaign(wanted: argparse.Namespace, folder: Path, progress: Progress) -> Totals:
    async with fork_server() as server:
        work = Campaign(server, folder, wanted, progress)
        await work.run()
        return work.totals


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(argv)
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        totals = asyncio.run(run_campaign(wanted, Path(folder), progress))
    print(json.dumps(totals.figures(wanted.seed, time.monotonic() - started)))
    return 1 if totals.ends["silent"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
