"""One run of a learner that is killed again and again, and what must be true of it in the end."""

import asyncio
import os
import random
import re
import signal
import socket
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.journal.audit import Audit, audit_journal
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.store import open_journal
from tests.faults.kills.child import GO, Life, family_of, keep_payloads
from tests.faults.kills.fork_server import ForkServer, tail
from tests.faults.kills.strace import CALLS, Call, Injection, Strace
from tests.support.checkpoints import saved_state
from tests.support.learner import FakeWorker
from tests.support.pictures import SeeingWorker
from tests.support.tiny_ranks import same_bits

MOMENTS = ("start", "train", "trained", "publish", "save", "saved")
TENSORS = "shard-00001-model-00001-of-00001.safetensors"
RANK_FILES = (TENSORS, "config.json", "rank.json", "manifest.json")
START_S = 30.0
# How long a start may live whose point of death does not come.
PATIENCE = 4.0


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one start, if it gets that far: whichever of these comes first."""

    injection: Injection | None = None
    # A moment of the ranks and how often it comes before.
    moment: str = ""
    count: int = 1
    # Seconds after the port is open.
    after_s: float | None = None


@dataclass(slots=True)
class Verdict:
    """The end of one run, and what it left."""

    # Acknowledged to the worker and not in the journal as it was sent.
    lost: int
    # Attempts that are in more than one step.
    twice: int
    bit_equal: bool
    books: Audit

    @property
    def good(self) -> bool:
        """Nothing is lost, twice or different."""
        return not self.lost and not self.twice and self.bit_equal and self.books.holds


@dataclass(slots=True)
class KilledRun:
    """A run in a folder of its own, with a worker that keeps its own record of receipts."""

    server: ForkServer
    folder: Path
    model: Path
    steps: int = 6
    every: int = 2
    port: int = field(default_factory=free_port)
    receipts: dict[tuple[str, int, int], bytes] = field(
        default_factory=dict[tuple[str, int, int], bytes]
    )
    kills: Counter[str] = field(default_factory=Counter[str])
    # What was hit: "fsync journal.sqlite-wal", "train", "time".
    points: Counter[str] = field(default_factory=Counter[str])
    # How the newest start was killed: `call`, `moment` or `time`.
    last_kind: str = ""
    # What strace saw of the newest start.
    calls: list[Call] = field(default_factory=list[Call])
    _worker: FakeWorker | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "learner.log"

    async def prepare(self) -> None:
        """Make what there is before the first start."""
        self.folder.mkdir(parents=True)
        self.make_pipe()
        await open_journal(self.run_dir).close()
        keep_payloads(self.run_dir)

    def make_pipe(self) -> None:
        """Make the pipe that a watched start waits for."""
        os.mkfifo(self.folder / GO)

    async def start(self, death: Death, *, same_worker: bool = True, may_fail: bool = False) -> int:
        """One life of the learner; its exit status, 0 when the run is done.

        Raises AssertionError when it ends by itself, unless it `may_fail`.
        """
        injection = death.injection
        life = Life(
            self.folder,
            self.model,
            self.port,
            self.steps,
            self.every,
            moment="" if injection else death.moment,
            count=death.count,
            wait=injection is not None,
        )
        pid = await self.server.begin("live", asdict(life), self.log)
        strace = await self._attach(pid, injection) if injection else None
        ending = asyncio.create_task(self.server.end())
        try:
            late = await self._play(pid, death, ending, same_worker=same_worker)
            status = await ending
        finally:
            if not ending.done():
                _kill(pid)
                await ending
        if strace:
            await strace.ended()
            self.calls = strace.calls()
        if status and not (may_fail and status > 0):
            self._note(death, status, late=late)
        return status

    async def finish(self) -> Verdict:
        """Let it live to its end, and compare everything."""
        status = await self.start(Death())
        assert status == 0, f"ended with {status}:\n{tail(self.log)}"
        return await self.verdict()

    async def verdict(self) -> Verdict:
        """Return the verdict on a run that is done."""
        lost, books = self.books()
        arguments = {"folder": self.folder, "model": self.model}
        await self.server.run("replay", arguments, self.log)
        final = self.run_dir / "checkpoints" / f"step-{self.steps:06d}"
        again = self.folder / "replayed"
        equal = same_bits(saved_state(final), saved_state(again))
        return Verdict(len(lost), len(books.twice), equal, books)

    def books(self) -> tuple[list[tuple[str, int, int]], Audit]:
        """Return what was acknowledged and is not in the journal as it was sent, and its audit."""
        with closing(sqlite3.connect(self.run_dir / JOURNAL_FILE)) as db:
            audit = audit_journal(db)
            rows = db.execute(
                "SELECT group_id, attempt_index, try, content_digest FROM trajectories"
            )
            journaled = {(group, index, n): digest for group, index, n, digest in rows}
        lost = [key for key, sent in self.receipts.items() if journaled.get(key) != sent]
        return lost, audit

    async def _attach(self, pid: int, injection: Injection) -> Strace:
        strace = await Strace.attach(pid, injection, self.folder / "strace.log")
        os.close(os.open(self.folder / GO, os.O_WRONLY))
        return strace

    async def _play(
        self, pid: int, death: Death, ending: asyncio.Task[int], *, same_worker: bool
    ) -> bool:
        """Be the learner's worker until it ends; True when it had to be killed from outside."""
        if not await self._opened(ending):
            return False
        async with self._working(same_worker=same_worker):
            await asyncio.wait({ending}, timeout=death.after_s)
            late = not ending.done()
            if late:
                _kill(pid)
            await asyncio.wait({ending})
        return late

    async def _opened(self, ending: asyncio.Task[int]) -> bool:
        """Return whether the learner came to open its port."""
        async with asyncio.timeout(START_S):
            while not ending.done():
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                        return True
                await asyncio.sleep(0.005)
        return False

    @asynccontextmanager
    async def _working(self, *, same_worker: bool) -> AsyncGenerator[None]:
        """A worker that dials now, so that no backoff of its channel holds the run up."""
        family, address = family_of(self.model), f"127.0.0.1:{self.port}"
        worker = SeeingWorker(address, family) if family else FakeWorker(address)
        worker.receipts = self.receipts
        if self._worker and same_worker:
            worker.incarnation, worker.run_epoch = self._worker.incarnation, self._worker.run_epoch
        self._worker = worker
        async with worker.working():
            yield

    def _note(self, death: Death, status: int, *, late: bool) -> None:
        assert status == -signal.SIGKILL, f"ended with {status}:\n{tail(self.log)}"
        kind, point = "moment", death.moment
        if late or not (death.injection or death.moment):
            kind, point = "time", "time"
        elif death.injection:
            hit = self.calls[-1]
            kind, point = "call", f"{hit.name} {_plain(hit.path)}"
        self.last_kind = kind
        self.kills[kind] += 1
        self.points[point] += 1


def journal_files(run_dir: Path) -> list[Path]:
    return [run_dir / name for name in (JOURNAL_FILE, f"{JOURNAL_FILE}-wal", MARK)]


def checkpoint_files(run_dir: Path, steps: int, epoch: int) -> list[Path]:
    """Every file and folder that a start of this epoch may touch."""
    root = run_dir / "checkpoints"
    folders = [
        root / name
        for step in range(1, steps + 1)
        for name in (f"step-{step:06d}", f"step-{step:06d}.tmp-{epoch}")
    ]
    return [root, *folders, *(folder / name for folder in folders for name in RANK_FILES)]


def next_epoch(run_dir: Path) -> int:
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        return db.execute("SELECT coalesce(max(run_epoch), 0) + 1 FROM epochs").fetchone()[0]


def random_death(chooser: random.Random, run: KilledRun, kinds: Sequence[str]) -> Death:
    """One of `kinds`, somewhere in the life of a learner."""
    kind = chooser.choice(kinds)
    if kind == "time":
        return Death(after_s=chooser.uniform(0.0, 0.6))
    if kind == "moment":
        return Death(moment=chooser.choice(MOMENTS), count=chooser.randint(1, 3), after_s=PATIENCE)
    if chooser.random() < 0.5:
        return Death(_in_next_checkpoint(chooser, run), after_s=PATIENCE)
    calls = chooser.choice(["write", "sync"])
    when = str(chooser.randint(1, 120 if calls == "write" else 30))
    return Death(Injection(CALLS[calls], journal_files(run.run_dir), when=when), after_s=PATIENCE)


def _in_next_checkpoint(chooser: random.Random, run: KilledRun) -> Injection:
    """A call on one file or folder of it, or the first on the journal after its rename."""
    root = run.run_dir / "checkpoints"
    made = [int(path.name[5:]) for path in root.glob("step-??????")]
    step = max(made, default=0) + run.every
    folder = root / f"step-{step:06d}.tmp-{next_epoch(run.run_dir)}"
    files = [folder / name for name in RANK_FILES]
    oldest = root / f"step-{min(made, default=0):06d}"
    choices = [
        *(Injection(CALLS["sync"], [path]) for path in (*files, folder, root)),
        *(Injection(CALLS["create"], [path]) for path in (*files, folder)),
        *(Injection(CALLS["write"], [path]) for path in files),
        *(Injection(CALLS["rename"], [folder]) for _ in range(4)),
        Injection(CALLS["remove"], [oldest, *(oldest / name for name in RANK_FILES)]),
    ]
    return chooser.choice(choices)


def _plain(path: Path) -> str:
    """`checkpoints/step-000004.tmp-3/rank.json` as `step-N.tmp/rank.json`."""
    words = [re.sub(r"^step-\d+(\.tmp)?(-\d+)?$", r"step-N\1", part) for part in path.parts[-2:]]
    return "/".join(words) if words[0].startswith("step-N") else words[1]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
