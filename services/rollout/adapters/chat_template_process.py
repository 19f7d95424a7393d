"""Rendering of chat templates in a child process, which a template cannot outlast."""

import atexit
import json
import signal
import subprocess
import threading
from typing import Any

from services.common.child_environment import child_environment
from services.common.python_command import python_command
from services.rollout.adapters.chat_template_child import CPU_S, MEMORY_BYTES
from services.rollout.ports import TemplateError

_COMMAND = python_command("-m", "services.rollout.adapters.chat_template_child")
_ENDED = (
    f"it takes more than {CPU_S:g} s or {MEMORY_BYTES >> 30} GiB of memory; correct"
    " chat_template.jinja in the model's folder"
)


class TemplateProcess:
    """A child that renders one template at a time, and is replaced when one has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render_template(self, **asked: Any) -> str:
        """Return the text of `render_jinja_template`, called with JSON's values.

        Raises TemplateError when the template raises, or takes too much time or memory.
        """
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            answer = self._exchange_line(line)
            if not answer and self._end_child() != -signal.SIGPROF:
                # Not for its time: whoever ended the child, it need not be the template.
                answer = self._exchange_line(line)
            if not answer:
                self._end_child()
                raise TemplateError(_ENDED)
        told = json.loads(answer)
        if "error" in told:
            raise TemplateError(told["error"])
        return told["text"]

    def close(self) -> None:
        with self._lock:
            self._end_child()

    def _exchange_line(self, line: bytes) -> bytes:
        """Send a line and read the answer; empty when the child has ended."""
        if self._child is None:
            self._child = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(ours=True),
                # A Ctrl-C is for this process, which may have more to render; its end is the
                # child's too, whose input ends with it.
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


# One for all tokenizers of a process: it keeps nothing but compiled templates.
TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.close)
