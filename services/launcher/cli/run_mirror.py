"""Local copy of the files of a remote launcher's run, for the inspector's pages."""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.files.durable_files import replace_file
from services.common.rpc import rpc
from services.launcher.cli.launcher_client import (
    LauncherConnection,
    LauncherError,
    describe_failure,
)
from services.launcher.cli.run_view import ENDED
from services.launcher.store.relayed_files import BLOCK_BYTES, digest_of, is_relayed
from services.launcher.store.run_files import JOURNAL, RUN_ID_PATTERN

if TYPE_CHECKING:
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

# Read by the inspector: the copy's launcher and time, and whether the run is active.
MIRROR_FILE = "mirror.json"
_VERSIONS_FILE = "versions.json"
_LOCK_FILE = "mirror.lock"
_PARTIAL = ".partial"
# Growing files: their unchanged blocks are not sent again.
_GROWING = (JOURNAL, "metrics.jsonl", "alarms.jsonl")
_KEPT_RUNS = 8
_CALL_S = 15.0
_STREAM_S = 600.0
_REFRESH_S = 3.0
# Refreshes take at most this share of the time.
_SHARE = 0.1


@contextmanager
def mirrored_run(connection: LauncherConnection, run_id: str) -> Generator["RunMirror"]:
    """Hold the copy of a run in this user's cache. If another command holds it, make a temporary
    copy. Raises LauncherError."""
    if not RUN_ID_PATTERN.fullmatch(run_id):
        raise LauncherError(f"the launcher sent {run_id!r}, which is not a run id")
    with ExitStack() as stack:
        runs = _cache_folder(connection.address.address)
        folder = runs / run_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_locked_for_us(stack, folder):
            runs = Path(stack.enter_context(TemporaryDirectory(prefix="flotilla-")))
            folder = runs / run_id
            folder.mkdir()
        _remove_old(runs, folder)
        yield RunMirror(connection, folder)


class RunMirror:
    """Copy of a run's files in `folder`."""

    def __init__(self, connection: LauncherConnection, folder: Path) -> None:
        self.folder = folder
        self._connection = connection
        self._stub: RunServiceAsyncStub = connection.stub
        self._versions = _read_versions(folder)
        self._files = {path: FileCopy(folder, path) for path in _GROWING}

    @property
    def runs(self) -> Path:
        """Runs folder that contains the copy, for the inspector."""
        return self.folder.parent

    async def refresh(self) -> bool:
        """Fetch all changes; return whether the run is active. Raises AioRpcError."""
        request = pb.GetRunRequest(run_id=self.folder.name)
        run = (await self._stub.GetRun(request, timeout=_CALL_S)).run
        while not await self._fetch():
            continue
        running = run.state not in ENDED
        await asyncio.to_thread(self._write_marks, running)
        return running

    async def follow(self, on_trouble: Callable[[str], None]) -> None:
        """Refresh until the run has ended. `on_trouble` gets the first error of each kind."""
        took, reported = 0.0, ""
        while True:
            await asyncio.sleep(max(_REFRESH_S, took / _SHARE))
            begun = time.monotonic()
            try:
                if not await self.refresh():
                    return
                trouble = ""
            except grpc.aio.AioRpcError as error:
                trouble = describe_failure(error)
            except OSError as error:
                trouble = str(error)
            if trouble and trouble != reported:
                on_trouble(trouble)
            took, reported = time.monotonic() - begun, trouble

    async def _fetch(self) -> bool:
        """Fetch changes; return False if the stream ended early because of its age."""
        try:
            await self._read_stream()
        except grpc.aio.AioRpcError as error:
            known = rpc.service_error(error)
            if known is None or known.reason != "STREAM_AGE":
                raise
            return False
        return True

    async def _read_stream(self) -> None:
        known = await asyncio.to_thread(self._known)
        request = pb.ReadRunFilesRequest(run_id=self.folder.name, known=known)
        files: dict[str, pb.RunFile] = {}
        async for part in self._stub.ReadRunFiles(request, timeout=_STREAM_S):
            match part.WhichOneof("part"):
                case "files":
                    files = {f.path: f for f in part.files.files if is_relayed(f.path)}
                    await asyncio.to_thread(self._remove_gone, files)
                case "block" if part.block.path in files:
                    block = part.block
                    copy = self._copy_of(block.path)
                    await asyncio.to_thread(copy.write, block.offset, block.data)
                case "complete" if part.complete in files:
                    await asyncio.to_thread(self._complete, files[part.complete])
                case _:
                    continue

    def _known(self) -> list[pb.KnownFile]:
        found: list[pb.KnownFile] = []
        for path in sorted({*self._versions, *_GROWING}):
            copy = self._files.get(path)
            # A partial copy is continued.
            version = "" if copy and copy.begun else self._versions.get(path, "")
            digests = b"".join(copy.digests()) if copy else b""
            found.append(pb.KnownFile(path=path, version=version, block_digests=digests))
        return found

    def _copy_of(self, path: str) -> "FileCopy":
        return self._files.setdefault(path, FileCopy(self.folder, path))

    def _complete(self, file: pb.RunFile) -> None:
        self._copy_of(file.path).complete(file.size, file.modify_time.ToNanoseconds())
        self._versions[file.path] = file.version
        if file.path not in _GROWING:
            self._files.pop(file.path)
        _write_json(self.folder / _VERSIONS_FILE, self._versions)

    def _remove_gone(self, files: dict[str, pb.RunFile]) -> None:
        for path in [path for path in self._versions if path not in files]:
            del self._versions[path]
            (self.folder / path).unlink(missing_ok=True)
            if path in _GROWING:
                self._files[path] = FileCopy(self.folder, path)

    def _write_marks(self, running: bool) -> None:
        marks = {"launcher": self._connection.address.address, "running": running}
        _write_json(self.folder / MIRROR_FILE, {**marks, "refreshed": time.time()})


class FileCopy:
    """One file of the copy; blocks go to a partial file until all have arrived."""

    def __init__(self, folder: Path, path: str) -> None:
        self.path = folder / path
        self._partial = self.path.with_name(f"{self.path.name}{_PARTIAL}")
        self._digests: list[bytes] | None = None

    @property
    def begun(self) -> bool:
        """True if some blocks of a newer version have arrived, but not all."""
        return self._partial.exists()

    def digests(self) -> list[bytes]:
        """Return the digests of the local blocks."""
        if self._digests is None:
            path = self._partial if self.begun else self.path
            self._digests = list(_read_digests(path))
        return self._digests

    def write(self, offset: int, data: bytes) -> None:
        """Write a block. Raises OSError."""
        digests, number = self.digests(), offset // BLOCK_BYTES
        self._begin()
        if offset % BLOCK_BYTES or len(data) > BLOCK_BYTES or number > len(digests):
            raise OSError(f"the launcher sent a block of {self.path.name} out of order")
        with self._partial.open("r+b") as file:
            file.seek(offset)
            file.write(data)
        digests[number : number + 1] = [digest_of(data)]

    def complete(self, size: int, modified_ns: int) -> None:
        """Replace the file by its new version. Raises OSError."""
        digests = self.digests()
        self._begin()
        os.truncate(self._partial, size)
        os.utime(self._partial, ns=(modified_ns, modified_ns))
        self._partial.replace(self.path)
        del digests[-(-size // BLOCK_BYTES) :]

    def _begin(self) -> None:
        if self.begun:
            return
        self.path.parent.mkdir(exist_ok=True, mode=0o700)
        if self.path.exists():
            shutil.copyfile(self.path, self._partial)
        else:
            self._partial.touch(mode=0o600)


def _read_digests(path: Path) -> Generator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield digest_of(block)


def _cache_folder(address: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(home) if home.startswith("/") else Path.home() / ".cache"
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    return root / "flotilla" / "inspected" / name


def _is_locked_for_us(stack: ExitStack, folder: Path) -> bool:
    file = stack.enter_context((folder / _LOCK_FILE).open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_old(runs: Path, own: Path) -> None:
    marks = sorted(runs.glob(f"*/{MIRROR_FILE}"), key=lambda path: -path.stat().st_mtime)
    for path in marks[_KEPT_RUNS:]:
        if path.parent != own:
            with ExitStack() as stack, suppress(OSError):
                if _is_locked_for_us(stack, path.parent):
                    shutil.rmtree(path.parent)


def _read_versions(folder: Path) -> dict[str, str]:
    """Return the versions of the local files; none if they cannot be read."""
    try:
        found = json.loads((folder / _VERSIONS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {p: str(v) for p, v in pairs if is_relayed(p) and (folder / p).is_file()}


def _write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(value).encode())
