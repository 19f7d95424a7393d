"""A run with two sharded ranks whose learner or rank is killed, and the same run undisturbed."""

import asyncio
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from torch import Tensor

from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.run_folder.metric_lines import parse_points
from flotilla_common.run_folder.trajectory_tables import trajectories_of
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.journal.plan_tables import plans_after
from tests.faults.kills.child import restore_payloads
from tests.faults.kills.fork_server import tail
from tests.faults.kills.killed_run import KilledRun
from tests.faults.kills.sharded_learner import RANKS, ShardedLife, TrustedRanks, sharded_config
from tests.support.checkpoints import save_ranks, saved_state
from tests.support.rank_configs import policy_config

LEARNER, RANK = "learner", "rank"
LIFE_S = 240.0


@dataclass(frozen=True, slots=True)
class Strike:
    """A kill of `victim`, so many seconds after a step is planned."""

    victim: str
    step: int
    after_s: float


@dataclass(slots=True)
class Undisturbed:
    """Results of the plans of a run without kills, by step."""

    states: dict[int, Mapping[str, Tensor]] = field(default_factory=dict[int, Mapping[str, Tensor]])
    losses: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(slots=True, kw_only=True)
class ShardedRun(KilledRun):
    """`KilledRun` of `sharded_learner`, killed from outside."""

    forge: Path
    chooser: random.Random

    async def live(self, strike: Strike | None) -> int:
        """One life of the learner; its exit status, 0 when the run is done."""

        async def play(pid: int, ending: asyncio.Task[int]) -> None:
            async with self._working(same_worker=True):
                if strike and await self._planned(strike.step, ending):
                    await asyncio.wait({ending}, timeout=strike.after_s)
                    self._strike(pid, strike.victim)
                await asyncio.wait({ending})

        return await self._live(play)

    async def _live(self, play: Callable[[int, asyncio.Task[int]], Awaitable[None]]) -> int:
        """One life, in which `play` receives the learner's process once its port is open."""
        life = self._make_life()
        message = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(life).items()}
        pid = await self.server.begin("live-sharded", message, self.log)
        ending = asyncio.create_task(self.server.end(LIFE_S))
        try:
            if await self._opened(ending):
                await play(pid, ending)
            return await ending
        finally:
            if not ending.done():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                await ending

    def _make_life(self) -> ShardedLife:
        return ShardedLife(self.folder, self.model, self.forge, self.port, self.steps, self.every)

    async def _planned(self, step: int, ending: asyncio.Task[int]) -> bool:
        """Return whether the run lived to plan this step."""
        while not ending.done():
            if self.planned() >= step:
                return True
            await asyncio.sleep(0.01)
        return False

    def planned(self) -> int:
        """Return how many steps are planned."""
        with closing(sqlite3.connect(self.run_dir / JOURNAL_FILE)) as db:
            return db.execute("SELECT count(*) FROM plans").fetchone()[0]

    def _strike(self, pid: int, victim: str) -> None:
        if victim == RANK:
            ranks = psutil.Process(pid).children()
            assert len(ranks) == RANKS, tail(self.log)
            pid = self.chooser.choice(ranks).pid
        os.kill(pid, signal.SIGKILL)
        self.kills[victim] += 1

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, as the run logged it."""
        points = parse_points((self.run_dir / "metrics.jsonl").read_bytes().splitlines())
        return {p["step"]: p["policy/loss"] for p in points if "policy/loss" in p}

    def read_states(self) -> list[tuple[int, Mapping[str, Tensor]]]:
        """Return every checkpoint that ranks were started from, in order, by its step."""
        folders = sorted((self.folder / "read").glob("*"), key=lambda p: int(p.name.split("-")[0]))
        return [(int(path.name[-6:]), saved_state(path)) for path in folders]

    def final_state(self) -> Mapping[str, Tensor]:
        """Return what the last checkpoint holds."""
        return saved_state(self.run_dir / "checkpoints" / f"step-{self.steps:06d}")

    async def undisturbed(self) -> Undisturbed:
        """Train on all plans in one go, with as many ranks."""
        scratch = self.folder / "undisturbed"
        scratch.mkdir()
        copy = scratch / JOURNAL_FILE
        with (
            closing(sqlite3.connect(self.run_dir / JOURNAL_FILE)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
            restore_payloads(target)
        config = sharded_config(scratch, self.steps, self.every)
        ranks = TrustedRanks(scratch, policy_config(self.model), config, scratch / "shm")
        found = Undisturbed()
        try:
            await ranks.start_ranks(None)
            with open_read_only(copy) as db:
                for plan in plans_after(db, 0):
                    attempts, damaged = trajectories_of(db, plan.attempts)
                    assert not damaged
                    batch = build_train_batch(plan.step, attempts, plan.settings)
                    result = await ranks.train_step(batch)
                    found.losses[plan.step] = result.metrics["policy/loss"]
                    saved = await save_ranks(ranks, scratch / f"step-{plan.step}")
                    found.states[plan.step] = saved_state(saved.directory)
                    shutil.rmtree(saved.directory)
        finally:
            await ranks.close()
        return found


def random_strike(chooser: random.Random, step: int) -> Strike:
    """Kill learner or rank at any time in the steps that follow this one."""
    return Strike(chooser.choice([LEARNER, RANK]), step, chooser.uniform(0.0, 0.5))
