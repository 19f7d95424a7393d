"""Cost of the journal: `python -m benchmarks.journal_cost [--trajectories 20000]`.

Fills a journal like a learner, with groups of eight trajectories of 2,000 tokens each and a step
every 64 groups; then checks it as at a start. The last line is one JSON object:

- `commit_ms`, `mark_ms`: medians of a commit of one group's eight trajectories, and of its part for
  the write and fsync of the mark; `mark_share`: the share of that part.
- `start_s`: seconds of the check at a start; `start_cpu_us`: its CPU microseconds per trajectory;
  `pages_share`: the share of SQLite's own check of all pages and indexes in the seconds.
- `trajectories`, `journal_mb`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.domain.attempts import AttemptKey, Purpose, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.domain.trajectory import Trajectory, TurnTiming, content_digest
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, connect_journal
from flotilla_learner.group_types import GroupSpec, Lease
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.progress_mark import Position, ProgressMark
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.startup_check import check_journal
from flotilla_learner.journal.store import Journal, lock_journal, open_journal
from flotilla_learner.sampling.tasks import Task

GROUP, STEP = 8, 64
TOKENS, TURNS = 2000, 12
POLICY = PolicyId(1, 0, b"f" * 16)


class TimedMark(ProgressMark):
    """Mark that times each of its notes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seconds: list[float] = []

    def note_commit(self, position: Position) -> None:
        began = time.perf_counter()
        super().note_commit(position)
        self.seconds.append(time.perf_counter() - began)


def spec_of(number: int) -> GroupSpec:
    task = Task(f"task-{number}", "booking", json.dumps({"key": number, "prompt": "x" * 400}))
    return GroupSpec(f"g{number:06d}r0", number, task, Purpose.TRAIN, GROUP, 1.0)


def trajectory_of(group: str, index: int) -> Trajectory:
    token_ids = np.full(TOKENS, index, np.int32)
    each = TOKENS // TURNS // 2
    pair = (Span(Author.ENVIRONMENT, each), Span(Author.POLICY, each, POLICY, 1.0))
    rest = Span(Author.ENVIRONMENT, TOKENS - 2 * each * TURNS)
    sequence = Sampled(token_ids, (*(pair * TURNS), rest), np.zeros(each * TURNS, np.float32))
    return Trajectory(
        key=AttemptKey(group, index, 0),
        lease_id=group,
        sequences=(sequence,),
        content_digest=content_digest((sequence,)),
        reward=float(index % 2),
        stop_reason=StopReason.DONE,
        turns=(TurnTiming(1.0, 0.5, 900, each),) * TURNS,
    )


async def fill_journal(journal: Journal, trajectories: int) -> list[float]:
    """Fill the journal; return the time until each group's trajectories were durable."""
    await journal.begin_epoch(1)
    seconds: list[float] = []
    groups: list[str] = []
    for number in range(trajectories // GROUP):
        spec = spec_of(number)
        lease = Lease(spec.group_id, spec, (), POLICY, "w0", 0.0)
        await journal.add_lease(lease, "i", spec.group_id, 1)
        made = [trajectory_of(spec.group_id, index) for index in range(GROUP)]
        began = time.perf_counter()
        await asyncio.gather(*(journal.add_trajectory(each) for each in made))
        seconds.append(time.perf_counter() - began)
        groups.append(spec.group_id)
        if len(groups) == STEP:
            step = number // STEP + 1
            keys = tuple(AttemptKey(group, index, 0) for group in groups for index in range(GROUP))
            await journal.commit_plan(Plan(step, keys), 1, groups, [])
            groups = []
    return seconds


def pages_s(path: Path) -> float:
    began = time.perf_counter()
    with closing(connect_journal(path, read_only=True)) as db:
        db.execute("PRAGMA integrity_check").fetchall()
    return time.perf_counter() - began


async def measure_journal(folder: Path, trajectories: int) -> dict[str, Any]:
    await open_journal(folder).close()
    mark = TimedMark(folder / MARK)
    journal = Journal(folder / JOURNAL_FILE, mark, lock_journal(folder))
    commits = await fill_journal(journal, trajectories)
    await journal.close()
    began, cpu = time.perf_counter(), time.process_time()
    found = check_journal(folder, folder.name, limit_s=3600)
    start_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    assert found.position is not None and found.position.acknowledged == trajectories
    commit, noted = statistics.median(commits), statistics.median(mark.seconds)
    return {
        "commit_ms": round(1000 * commit, 2),
        "mark_ms": round(1000 * noted, 2),
        "mark_share": round(noted / commit, 2),
        "start_s": round(start_s, 2),
        "start_cpu_us": round(1e6 * cpu_s / trajectories, 1),
        "pages_share": round(pages_s(folder / JOURNAL_FILE) / start_s, 2),
        "trajectories": trajectories,
        "journal_mb": round((folder / JOURNAL_FILE).stat().st_size / 1e6),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=20_000)
    wanted = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        trajectories = wanted.trajectories // GROUP * GROUP
        print(json.dumps(asyncio.run(measure_journal(Path(folder) / "run", trajectories))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
