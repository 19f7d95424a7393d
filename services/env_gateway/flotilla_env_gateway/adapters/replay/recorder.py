"""Recording of a run: what the environments of its episodes answered, in files of the run.

A thread of its own writes, so that no call or grade waits for the disk; each line is written as it
comes. What cannot be written ends the recording of its episode, and nothing else."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from flotilla_common.domain.attempts import Grade
from flotilla_common.files.durable_files import replace_file, sync_path
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.redaction import redact
from flotilla_env_gateway.adapters.replay import record_format as form
from flotilla_env_gateway.adapters.replay.record_format import Fields, PutPart
from flotilla_env_gateway.ports import (
    CallAnswer,
    EpisodeRecord,
    Instance,
    Part,
    PolicyCall,
    ProvisionRequest,
    Recorder,
    Submission,
    Text,
    Tool,
)

_LOG = get_logger(__name__)
# In memory, of what is not written yet.
_MOST_WAITING_BYTES = 64 * 2**20
# Of a line without the parts of its answer, about.
_LINE_BYTES = 500

MakeLine = Callable[[PutPart], Fields]


class _EndedError(Exception):
    """Nothing more of an episode can be recorded; the message has the reason."""


class Recording(Recorder):
    """The folder of one run's recording, which its gateways share. Each adds to it until it holds
    `max_bytes` by its own count, which begins with what it found."""

    def __init__(self, run_dir: Path, *, max_bytes: int) -> None:
        """Raises ConfigError."""
        self._folder = run_dir / form.FOLDER
        self._max_bytes = max_bytes
        self._bytes = 0
        self._full = False
        self._waiting = 0
        try:
            for name in (form.EPISODES, form.PARTS):
                (self._folder / name).mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / form.FORMAT_FILE, form.FORMAT)
        except OSError as error:
            message = f"env_gateway.record: {self._folder}: {error.strerror}; free it, or unset it"
            raise ConfigError(message) from error
        self._writer = ThreadPoolExecutor(1, "recording")
        self._writer.submit(self._count_found)

    def start_episode(self, request: ProvisionRequest) -> EpisodeRecord:
        return WrittenRecord(self, request)

    async def close(self) -> None:
        """Write what waits."""
        await asyncio.to_thread(self._writer.shutdown)

    def add_line(self, record: "WrittenRecord", size: int, make: MakeLine) -> None:
        """Have a line written, whose parts hold about `size` bytes."""
        if self._waiting > _MOST_WAITING_BYTES:
            size, make = 0, _refuse_slowly
        size += _LINE_BYTES
        self._waiting += size
        work = asyncio.get_running_loop().run_in_executor(
            self._writer, self._write_line, record, make
        )
        work.add_done_callback(lambda _: self._forget_waiting(size))

    def _forget_waiting(self, size: int) -> None:
        self._waiting -= size

    # What follows runs in the writer's thread.

    def _count_found(self) -> None:
        found = [path.stat().st_size for path in self._folder.rglob("*") if path.is_file()]
        self._bytes = sum(found)

    def _write_line(self, record: "WrittenRecord", make: MakeLine) -> None:
        if record.ended or (self._full and not record.begun):
            return
        try:
            fields = make(self._put)
            lines = [fields] if record.begun else [record.header, fields]
            data = b"".join(_encode_line(line) for line in lines)
            # An end is written even if there is no room: what is there is whole.
            record.ended = fields["op"] == form.END
            self._reserve(len(data), needed=not record.ended)
            self._append(record, data)
            if record.ended:
                sync_path(self._path_of(record))
        except Exception as error:  # noqa: BLE001
            # A fault of ours must not cost the run more than a full disk does.
            self._cut(record, str(error) or repr(error))

    def _put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        path = self._folder / form.PARTS / name
        if not path.exists():
            self._reserve(len(data))
            replace_file(path, data)
        return name

    def _reserve(self, size: int, *, needed: bool = True) -> None:
        """Count bytes to be written. Raises _EndedError from the first on that do not fit: what is
        smaller must not slip through later."""
        self._full = self._full or self._bytes + size > self._max_bytes
        if not self._full:
            self._bytes += size
        elif needed:
            why = f"the recording holds env_gateway.limits.record_bytes, {self._max_bytes}"
            raise _EndedError(why)

    def _cut(self, record: "WrittenRecord", why: str) -> None:
        record.ended = True
        _LOG.warning("recording_cut", episode_id=record.episode_id, why=why)
        if record.begun:
            with suppress(OSError):
                self._append(record, _encode_line({"op": form.CUT, "why": redact(why)}))

    def _append(self, record: "WrittenRecord", data: bytes) -> None:
        record.begun = True
        with self._path_of(record).open("ab") as file:
            file.write(data)

    def _path_of(self, record: "WrittenRecord") -> Path:
        return self._folder / form.EPISODES / f"{record.episode_id}.jsonl"


class WrittenRecord(EpisodeRecord):
    """The record of one episode, a file. `begun` and `ended` are the writer's."""

    def __init__(self, recording: Recording, request: ProvisionRequest) -> None:
        self.episode_id = request.episode_id
        self.begun = self.ended = False
        self.header: Fields = {
            "op": form.EPISODE,
            "at": time.time(),
            "episode_id": request.episode_id,
            "group_id": request.group_id,
            "attempt_index": request.attempt_index,
            "try_index": request.try_index,
            "task": form.identify_task(request.task),
        }
        self._recording = recording
        self._closed = False

    def note_opened(self, instance: Instance, tools: Sequence[Tool], shown: Sequence[Part]) -> None:
        versions = {"env_version": instance.env_version, "data_version": instance.data_version}

        def make(put: PutPart) -> Fields:
            listed = form.encode_tools(tools, put)
            return {"tools": listed, "shown": form.encode_parts(shown, put), **versions}

        self._note(form.OPENED, make, shown)

    def note_unopened(self, failure: str) -> None:
        self._note(form.UNOPENED, lambda put: {"failure": redact(failure)})

    def note_call(self, call: PolicyCall, answer: CallAnswer) -> None:
        def make(put: PutPart) -> Fields:
            return {
                "seq": call.seq,
                "parallel": call.tool.parallel,
                "key": form.identify_call(call),
                "result": form.encode_answer(answer, put),
            }

        self._note(form.CALL, make, answer.parts)

    def note_tools(self, tools: Sequence[Tool]) -> None:
        self._note(form.TOOLS, lambda put: {"result": form.encode_tools(tools, put)})

    def note_loss(self, why: str) -> None:
        self._note(form.LOST, lambda put: {"result": redact(why)})

    def note_grade(self, submission: Submission, grade: Grade) -> None:
        self._note(
            form.GRADE,
            lambda put: {
                "key": form.identify_grade(submission),
                "result": form.encode_grade(grade),
            },
        )

    def note_end(self) -> None:
        self._note(form.END, lambda put: {})
        self._closed = True

    def _note(self, op: str, make: MakeLine, parts: Sequence[Part] = ()) -> None:
        if self._closed:
            return
        sizes = [len(part.text) if isinstance(part, Text) else part.size for part in parts]
        self._recording.add_line(self, sum(sizes), lambda put: {"op": op, **make(put)})


def _encode_line(fields: Fields) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _refuse_slowly(put: PutPart) -> Fields:
    raise _EndedError("the disk is slower than the environments")
