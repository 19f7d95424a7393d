"""Kills of a learner and its two sharded ranks at single system calls on a checkpoint."""

import asyncio
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from tests.faults.kills.fork_server import tail
from tests.faults.kills.killed_run import RANK_FILES, next_epoch
from tests.faults.kills.sharded_learner import RANKS
from tests.faults.kills.sharded_run import LEARNER, ShardedRun
from tests.faults.kills.strace import CALLS, Injection, Strace
from tests.support.waiting import until

NAMES = (*CALLS["sync"], *CALLS["rename"])
FOLDER, PARENT = "FOLDER", "."
FILES = (*RANK_FILES, "shard-00002-model-00001-of-00001.safetensors")
# More often than any call comes: strace then only watches.
_NEVER = "65000"


@dataclass(frozen=True, slots=True)
class SaveCall:
    """The `number`-th call of this name by a process on a file of one checkpoint."""

    # "learner", or a rank as its log is called.
    process: str
    name: str
    # Below the folder of checkpoints, which is `PARENT` itself; `FOLDER` is the temporary one.
    path: str
    number: int


@dataclass(slots=True, kw_only=True)
class TracedRun(ShardedRun):
    """`ShardedRun` whose processes are watched by strace, and killed at one call."""

    # Of the newest life.
    traces: dict[str, Strace] = field(default_factory=dict[str, Strace])

    async def watched_calls(self) -> list[SaveCall]:
        """Live a run without kills; return the calls by which its last checkpoint is saved."""
        folder = f"step-{self.steps:06d}.tmp-1"
        paths = [self._root, self._root / folder, *(self._root / folder / name for name in FILES)]
        watching = Injection(NAMES, paths, when=_NEVER)
        status = await self._live_traced(dict.fromkeys((LEARNER, *self._rank_logs()), watching))
        assert status == 0, tail(self.log)
        found = Counter(
            (process, call.name, str(call.path.relative_to(self._root)).replace(folder, FOLDER))
            for process, trace in self.traces.items()
            for call in trace.calls()
        )
        # Each checkpoint has its own call on the folder that all are in.
        times = {key: 1 if key[2] == PARENT else count for key, count in found.items()}
        return [SaveCall(*key, n + 1) for key, count in times.items() for n in range(count)]

    async def live_until(self, call: SaveCall) -> None:
        """Live until a process is killed at this call, for the second checkpoint."""
        place = self._root / call.path.replace(FOLDER, self._second_folder().name)
        number = 2 if call.path == PARENT else call.number
        injection = Injection((call.name,), [place], when=str(number))
        assert await self._live_traced({call.process: injection}) != 0, f"{call} never came"
        hit = self.traces[call.process].calls()[-1]
        assert (hit.name, hit.path) == (call.name, place), f"{hit}:\n{tail(self.log)}"
        self.kills[call.process] += 1

    async def live_until_commit(self) -> None:
        """Live until the learner is killed as it fsyncs the journal with the second checkpoint."""
        renamed = Injection(CALLS["rename"], [self._second_folder()], "signal=SIGSTOP")
        synced = Injection(CALLS["sync"], [self.run_dir / f"{JOURNAL_FILE}-wal"])

        async def play(pid: int, ending: asyncio.Task[int]) -> None:
            log = self.folder / "renamed.log"
            strace = await Strace.attach(pid, renamed, log)
            async with self._working(same_worker=True):
                await until(lambda: "stopped by SIGSTOP" in log.read_text())
                await strace.detach()
                strace = await Strace.attach(pid, synced, self.folder / "synced.log")
                os.kill(pid, signal.SIGCONT)
                await asyncio.wait({ending})
            await strace.ended()
            assert strace.calls(), tail(self.log)

        assert await self._live(play) == -signal.SIGKILL
        self.kills[LEARNER] += 1

    async def live_until_removal(self) -> None:
        """Live until the learner is killed as it begins to remove the oldest checkpoint."""
        oldest = self._root / f"step-{self._saved_step('min'):06d}"
        paths = [oldest, *(oldest / name for name in FILES)]
        assert await self._live_traced({LEARNER: Injection(CALLS["remove"], paths)}) != 0
        assert self.traces[LEARNER].calls()[-1].path.is_relative_to(oldest)
        self.kills[LEARNER] += 1

    def newest(self) -> int:
        """Return the step of the checkpoint that a start takes."""
        return self._saved_step("max")

    def _saved_step(self, which: str) -> int:
        with closing(sqlite3.connect(self.run_dir / JOURNAL_FILE)) as db:
            return db.execute(f"SELECT {which}(step) FROM checkpoints").fetchone()[0]

    async def _live_traced(self, injections: Mapping[str, Injection]) -> int:
        """Live with these injections, by process; return the exit status."""

        async def play(pid: int, ending: asyncio.Task[int]) -> None:
            pids = {LEARNER: pid, **await self._rank_pids()}
            self.traces = {
                process: await Strace.attach(
                    pids[process], injection, self.folder / f"{process}.st"
                )
                for process, injection in injections.items()
            }
            async with self._working(same_worker=True):
                await asyncio.wait({ending})
            for trace in self.traces.values():
                await trace.ended()

        # Nothing of the life before may be taken for this one's.
        await until(lambda: not self._found_ranks())
        return await self._live(play)

    async def _rank_pids(self) -> dict[str, int]:
        await until(lambda: len(self._found_ranks()) == RANKS)
        return self._found_ranks()

    def _found_ranks(self) -> dict[str, int]:
        """Return the ranks' processes by the logs that they write."""
        logs = {str(path): name for name, path in self._rank_logs().items()}
        found: dict[str, int] = {}
        for process in psutil.process_iter():
            try:
                # Those that stand in for them are known by the forge's address.
                if str(self.forge) not in process.cmdline():
                    found[logs[os.readlink(f"/proc/{process.pid}/fd/2")]] = process.pid
            except (KeyError, OSError, psutil.Error):
                continue
        return found

    def _rank_logs(self) -> dict[str, Path]:
        names = ["rank", *(f"rank-{index}" for index in range(1, RANKS))]
        return {name: self.folder / f"{name}.log" for name in names}

    def _second_folder(self) -> Path:
        """Return where a life makes its second checkpoint: it first trains what is planned."""
        return self._root / f"step-{self.planned() + 2:06d}.tmp-{next_epoch(self.run_dir)}"

    @property
    def _root(self) -> Path:
        return self.run_dir / "checkpoints"
