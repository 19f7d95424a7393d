"""Whole runs of `flotilla train` whose learner, rank or both are killed."""

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from services.common.run_folder.journal_file import JOURNAL_FILE
from services.learner.journal.audit import audit_journal
from tests.faults.harness import LEARNER, RANK, FaultRun, spec, write_tasks
from tests.faults.kills.killed_run import Verdict
from tests.faults.replay import replayed
from tests.faults.small_policy import write_policy
from tests.support.checkpoints import saved_state
from tests.support.tiny_ranks import same_bits

STEPS = 6
KILLS = 3
VICTIMS = ((LEARNER,), (RANK,), (LEARNER, RANK))


class FullRun:
    """One run of all services, with a small engine that samples from real weights."""

    def __init__(self, folder: Path, chooser: random.Random) -> None:
        self._folder = folder
        self._chooser = chooser
        self.points: Counter[str] = Counter()

    async def run(self, killed: Callable[[str], None]) -> Verdict:
        """Call `killed` after every kill. Raises AssertionError when the run does not end well."""
        policy = self._folder / "policy"
        policy.mkdir(parents=True)
        tasks = write_tasks(self._folder)
        write_policy(policy, [tasks.read_text()])
        os.environ["FLOTILLA_TEST_TASKS"] = str(tasks)
        learner = {"steps": STEPS, "checkpoint": {"every": 2}}
        run = FaultRun(self._folder, spec(policy, tasks, **learner))
        try:
            await run.train()
            await run.step(1)
            run.keep_payloads()
            for step in range(1, KILLS + 1):
                await self._kill(run, step, killed)
            await run.completes()
            return await self._verdict(run)
        finally:
            await run.end()

    async def _kill(self, run: FaultRun, step: int, killed: Callable[[str], None]) -> None:
        """Once this step is planned, wherever the processes then are."""
        victims = self._chooser.choice(VICTIMS)
        await run.step(step)
        before = {module: run.processes(module) for module in (LEARNER, RANK)}
        run.kill(*victims)
        for module in victims:
            self.points[module] += 1
            killed("process")
        for module in (LEARNER, RANK):
            if module in victims:
                await run.restarted(module, before[module])

    async def _verdict(self, run: FaultRun) -> Verdict:
        """The engine's process keeps no receipts: lost is what plans name and the journal lacks."""
        with closing(sqlite3.connect(run.folder / JOURNAL_FILE)) as db:
            books = audit_journal(db)
        final = run.folder / "checkpoints" / f"step-{STEPS:06d}"
        again = await replayed(run, self._folder)
        equal = same_bits(saved_state(final), saved_state(again))
        return Verdict(len(books.unknown), len(books.twice), equal, books)
