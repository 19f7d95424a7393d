"""Rendering of conversations in a process of the rollout's: only it knows dialects."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from flotilla_common.episodes.conversations import Conversation, RenderEnd, RenderSettings
from flotilla_common.episodes.demonstrations import DemonstrationHead
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_launcher.cli.terminal import CommandError

_COMMAND = python_command("-m", "flotilla_rollout.rendering")
# Gated models need it, for their tokenizer too.
_HUB_TOKEN = "HF_TOKEN"
_ENCODER = msgspec.json.Encoder()


class Conversations(Protocol):
    """Conversations of a file or a run."""

    total: int

    def read(self) -> Iterator[Conversation | None]:
        """Yield conversations, and None for each that is left out."""
        ...

    def end(self) -> RenderEnd:
        """Return what became of them, once all are read."""
        ...


def render_conversations(
    spec: Mapping[str, Any],
    conversations: Conversations,
    out: Path,
    show_progress: Callable[[int, int], object],
) -> DemonstrationHead:
    """Write conversations to `out` by the dialect of a spec, and return what the file says of
    itself; there is none without a sequence. Raises CommandError, and what reading raises."""
    dialect = spec.get("rollout", {}).get("dialect", {})
    settings = RenderSettings(spec.get("policy", {}), dialect, str(out.absolute()))
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(_HUB_TOKEN, ours=True),
        )
        assert child.stdin is not None and child.stdout is not None
        with child:
            try:
                _send(child.stdin, settings, conversations, show_progress)
            except BrokenPipeError:
                # It has ended, and says why.
                pass
            except BaseException:
                child.kill()
                raise
            answer = child.stdout.read()
        return _read_answer(answer, child.returncode, errors)


def _send(
    pipe: IO[bytes],
    settings: RenderSettings,
    conversations: Conversations,
    show_progress: Callable[[int, int], object],
) -> None:
    with pipe:
        pipe.write(_ENCODER.encode(settings) + b"\n")
        for done, each in enumerate(conversations.read(), start=1):
            if each is not None:
                pipe.write(_ENCODER.encode(each) + b"\n")
            show_progress(done, conversations.total)
        pipe.write(_ENCODER.encode(conversations.end()) + b"\n")


def _read_answer(answer: bytes, code: int, errors: IO[bytes]) -> DemonstrationHead:
    try:
        told = json.loads(answer)
    except ValueError:
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        raise CommandError(f"the rendering of conversations ended with {code}: {last}") from None
    if "error" in told:
        raise CommandError(told["error"])
    return msgspec.convert(told, DemonstrationHead)
