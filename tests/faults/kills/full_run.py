"""Whole runs of `flotilla train` whose processes are killed."""

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.journal.audit import audit_journal
from tests.faults.harness import (
    ENGINE,
    LEARNER,
    LIMIT_S,
    NOTICE_SOON,
    RANK,
    VLLM_ROLLOUT,
    FaultRun,
    spec,
    write_tasks,
)
from tests.faults.kills.killed_run import Verdict
from tests.faults.replay import replayed
from tests.faults.small_policy import write_policy
from tests.support.checkpoints import saved_state
from tests.support.tiny_ranks import same_bits
from tests.support.vision_models import make_vision_model
from tests.support.vision_runs import TRAINED, vision_spec

STEPS = 6
EVERY = {"every": 2}
VICTIMS = ((LEARNER,), (RANK,), (LEARNER, RANK))


@dataclass(frozen=True, slots=True)
class FullKind:
    """What a whole run trains, and what is killed in it, at each of the first steps."""

    # Writes what the run needs to a folder.
    make_spec: Callable[[Path], dict[str, Any]]
    victims: tuple[tuple[str, ...], ...]
    kills: int
    # How long a start may take on a busy machine.
    limit_s: float = LIMIT_S


def _text_spec(folder: Path) -> dict[str, Any]:
    """Return the spec of a run with a small engine that samples from real weights."""
    policy = folder / "policy"
    policy.mkdir()
    tasks = write_tasks(folder)
    write_policy(policy, [tasks.read_text()])
    os.environ["FLOTILLA_TEST_TASKS"] = str(tasks)
    return spec(policy, tasks, steps=STEPS, checkpoint=EVERY)


def _vision_spec(folder: Path) -> dict[str, Any]:
    """Return the spec of a run with vLLM, whose policy's tower is trained on screens."""
    model = folder / "model"
    make_vision_model(model, "qwen3_vl")
    wish = vision_spec(
        model,
        folder,
        TRAINED,
        groups=2,
        attempts=4,
        steps=STEPS,
        checkpoint=EVERY,
        lease_ttl_s=5.0,
        attach_grace_s=1.0,
    )
    return wish | {"name": "faults", "launcher": NOTICE_SOON}


TEXT = FullKind(_text_spec, VICTIMS, kills=3)
VISION = FullKind(_vision_spec, (*VICTIMS, (ENGINE,), (VLLM_ROLLOUT,)), kills=5, limit_s=600.0)


class FullRun:
    """One run of all services."""

    def __init__(self, folder: Path, chooser: random.Random, kind: FullKind = TEXT) -> None:
        self._folder = folder
        self._chooser = chooser
        self._kind = kind
        self.points: Counter[str] = Counter()

    async def run(self, killed: Callable[[str], None]) -> Verdict:
        """Call `killed` after every kill. Raises AssertionError when the run does not end well."""
        self._folder.mkdir(parents=True)
        run = FaultRun(self._folder, self._kind.make_spec(self._folder))
        run.limit_s = self._kind.limit_s
        try:
            await run.train()
            await run.step(1)
            run.keep_payloads()
            for step in range(1, self._kind.kills + 1):
                await self._kill(run, step, killed)
            await run.completes()
            return await self._verdict(run)
        finally:
            await run.end()

    async def _kill(self, run: FaultRun, step: int, killed: Callable[[str], None]) -> None:
        """Once this step is planned, wherever the processes then are."""
        victims = self._chooser.choice(self._kind.victims)
        await run.step(step)
        await run.until(lambda: all(map(run.processes, victims)))
        before = {module: run.processes(module) for module in victims}
        run.kill(*victims)
        for module in victims:
            self.points[module] += 1
            killed("process")
        for module in victims:
            await run.restarted(module, before[module])

    async def _verdict(self, run: FaultRun) -> Verdict:
        """The engine's process keeps no receipts: lost is what plans name and the journal lacks."""
        with closing(sqlite3.connect(run.folder / JOURNAL_FILE)) as db:
            books = audit_journal(db)
        final = run.folder / "checkpoints" / f"step-{STEPS:06d}"
        again = await replayed(run, self._folder)
        equal = same_bits(saved_state(final), saved_state(again))
        return Verdict(len(books.unknown), len(books.twice), equal, books)
