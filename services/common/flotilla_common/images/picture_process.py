"""Reading of files of pictures in a child process, which can be killed.

Decoders hold the interpreter's lock for up to a second, run on bytes that anybody may have written,
and take time and memory that nothing in the parent could bound."""

import json
import signal
import subprocess
import threading

from flotilla_common.images.picture import Picture
from flotilla_common.images.picture_child import CPU_S, LENGTH_BYTES, MEMORY_BYTES
from flotilla_common.images.picture_files import PictureRefused, check_bytes
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command

_COMMAND = python_command("-m", "flotilla_common.images.picture_child")
_ENDED = f"it takes more than {CPU_S:g} s or {MEMORY_BYTES >> 30} GiB of memory to read"


class PictureProcess:
    """A child that reads one file at a time, and is replaced if a file ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def read_picture(self, data: bytes) -> Picture:
        """Return the picture in a file, as `picture_files.read_picture` does.

        Waits for the child: call it off the event loop. Raises PictureRefused."""
        check_bytes(len(data))
        with self._lock:
            picture = self._exchange(data)
            if picture is None and self._end_child() != -signal.SIGPROF:
                # Not by the time limit: something other than the file may have ended it.
                picture = self._exchange(data)
            if picture is None:
                self._end_child()
                raise PictureRefused(_ENDED)
        return picture

    def close(self) -> None:
        with self._lock:
            self._end_child()

    def _exchange(self, data: bytes) -> Picture | None:
        """Send a file and read the answer; None if the child has ended. Raises PictureRefused."""
        child = self._child = self._child or _start_child()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(len(data).to_bytes(LENGTH_BYTES))
            child.stdin.write(data)
            child.stdin.flush()
            line = child.stdout.readline()
            answer = json.loads(line or b"null")
            anew = child.stdout.read(answer.get("bytes", 0)) if answer else b""
        except BrokenPipeError:
            answer, anew = None, b""
        if not answer or len(anew) < answer.get("bytes", 0):
            return None
        if "refused" in answer:
            raise PictureRefused(answer["refused"])
        sha256, mime, width, height = answer["picture"]
        return Picture(sha256, mime, width, height, anew or data)

    def _end_child(self) -> int | None:
        """End the child; return its exit code, if there was one."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.kill()
        child.communicate()
        return child.returncode


def _start_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(ours=True),
        # Ctrl-C is for the parent, which may have more to read; the child ends with it, because its
        # input closes.
        start_new_session=True,
    )
