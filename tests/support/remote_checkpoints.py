"""Stores, and learners that upload to them."""

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import httpx
from moto.server import ThreadedMotoServer

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore, open_store
from flotilla_learner.checkpoints.remote_layout import Progress, Stamp
from flotilla_learner.checkpoints.remote_staging import Source, Staged, stage
from flotilla_learner.checkpoints.remote_target import RemoteTarget
from flotilla_learner.checkpoints.remote_upload import Identity, Uploader
from flotilla_learner.journal.schema import CheckpointRow
from flotilla_learner.journal.store import open_journal
from flotilla_learner.ports import Ranks, RemoteStore
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, learner, make_config

BUCKET = "checkpoints"
RUN_ID = "run"
SPEC = json.dumps({"name": "test"})


@contextmanager
def s3_server() -> Generator[str]:
    """The endpoint of an S3 in memory, with a bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        # Servers of one process share what they keep.
        httpx.post(f"{endpoint}/moto-api/reset").raise_for_status()
        files: Any = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
        files.mkdir(BUCKET)
        yield endpoint
    finally:
        server.stop()


def s3_store(endpoint: str, prefix: str) -> FsspecStore:
    return open_store(f"s3://{BUCKET}/{prefix}/{RUN_ID}", {"endpoint_url": endpoint})


def no_wait(seconds: float) -> bool:
    """Retry at once."""
    return False


class Unreliable:
    """An unreliable store: `fault` is called before each operation."""

    def __init__(self, store: RemoteStore, fault: Callable[[str, str], None]) -> None:
        self._store = store
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._store, name)
        if not callable(own):
            return own

        def call(*arguments: Any) -> Any:
            self._fault(name, " ".join(str(argument) for argument in arguments))
            return own(*arguments)

        return call


def unreliable(store: RemoteStore, fault: Callable[[str, str], None]) -> Any:
    """A store that behaves like another, unless `fault` raises."""
    return Unreliable(store, fault)


class UploadingMachine:
    """A run's folder on one machine, with checkpoints that no ranks have written."""

    def __init__(
        self, folder: Path, store: RemoteStore, *, run_epoch: int = 1, spec: str = SPEC
    ) -> None:
        self.run_dir = folder
        self.spec = spec
        self.store = store
        self.run_epoch = run_epoch
        self.who = Identity(RUN_ID, run_epoch, f"incarnation{run_epoch}")
        self.place = RemoteTarget(store, folder, spec, keep=2)
        self.uploader = Uploader(store, self.who, folder, keep=2, wait=no_wait)

    async def make(self, step: int, files: dict[str, bytes] | None = None) -> CheckpointRow:
        """Write a committed checkpoint; its files are a few bytes that depend on the step."""
        directory = self.run_dir / "checkpoints" / f"step-{step:06d}"
        directory.mkdir(parents=True)
        sha256: dict[str, str] = {}
        for name, data in (files or {"model.bin": b"%d" % step, "sub/more.bin": b"more"}).items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(data)
            sha256[name] = digest(data)
        row = CheckpointRow(step, str(directory), sha256)
        journal = open_journal(self.run_dir, RUN_ID)
        await journal.commit_checkpoint(row, keep=100)
        epoch = "INSERT OR IGNORE INTO epochs VALUES (?, 0, 0)"
        await journal.run_transaction(lambda db: db.execute(epoch, (self.run_epoch,)))
        await journal.close()
        return row

    def stage(self, row: CheckpointRow) -> Staged:
        source = Source(row, self.run_dir, self.run_dir / JOURNAL_FILE, self.spec)
        return stage(source, Stamp(self.run_epoch, row.step), lambda: None)

    async def upload(self, step: int) -> Staged:
        """Make a checkpoint and upload it to the store."""
        staged = self.stage(await self.make(step))
        self.uploader.upload(staged)
        return staged

    def note(self, acknowledged: int, step: int) -> None:
        """Record the run's progress, like its learner does now and then."""
        progress = Progress(self.run_epoch, acknowledged, step)
        self.store.write(progress.name, progress.encode())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifests(store: RemoteStore) -> list[str]:
    return [Path(name).stem for name in store.list_files("manifests")]


async def train(
    folder: Path,
    store: RemoteStore | None,
    ranks: Ranks | None = None,
    export: Callable[[Path, Path], None] | None = None,
    timeout_s: float = 60,
    **changes: Any,
) -> dict[str, Any]:
    """A whole start of a learner with a willing worker; returns the summary.

    Strictly on policy and one worker: what is sampled is a function of the run's seed.
    """
    os.makedirs(folder, exist_ok=True)
    values: dict[str, Any] = {"max_staleness": 0, "steps": 6, **changes}
    config = make_config(folder, **values)
    ranks = ranks or FakeRanks(folder / "weights")
    async with (
        learner(folder, config, ranks, store, export=export) as running,
        FakeWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, timeout_s)
    return json.loads((folder / "run" / "summary.json").read_text())


def query(run_dir: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        return db.execute(sql).fetchall()
