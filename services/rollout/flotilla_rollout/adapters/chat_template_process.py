"""Rendering of chat templates in a child process, which can be killed."""

import atexit
import json
import signal
import subprocess
import threading
from typing import Any

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_rollout.adapters.chat_template_child import CPU_S, MEMORY_BYTES
from flotilla_rollout.tokenizer_port import TemplateError

_COMMAND = python_command("-m", "flotilla_rollout.adapters.chat_template_child")
_ENDED = (
    f"it takes more than {CPU_S:g} s or {MEMORY_BYTES >> 30} GiB of memory; correct"
    " chat_template.jinja in the model's folder"
)


class TemplateProcess:
    """A child that renders one template at a time, and is replaced if a template ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render_template(self, **arguments: Any) -> str:
        """Return the text of `render_jinja_template`, called with JSON values.

        Raises TemplateError if the template raises, or takes too much time or memory.
        """
        line = json.dumps(arguments).encode() + b"\n"
        with self._lock:
            answer = self._exchange_line(line)
            if not answer and self._end_child() != -signal.SIGPROF:
                # Not by the time limit: something other than the template may have ended it.
                answer = self._exchange_line(line)
            if not answer:
                self._end_child()
                raise TemplateError(_ENDED)
        result = json.loads(answer)
        if "error" in result:
            raise TemplateError(result["error"])
        return result["text"]

    def close(self) -> None:
        with self._lock:
            self._end_child()

    def _exchange_line(self, line: bytes) -> bytes:
        """Send a line and read the answer; empty if the child has ended."""
        if self._child is None:
            self._child = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(ours=True),
                # Ctrl-C is for this process, which may have more to render; the child ends with it,
                # because its input closes.
                start_new_session=True,
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._child.stdout.readline()

    def _end_child(self) -> int | None:
        """End the child; return its exit code, if there was one."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.kill()
        child.communicate()
        return child.returncode


# Shared by all tokenizers of a process: it only keeps compiled templates.
TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.close)
