"""Stages of a transfer at which a sender or a receiver can be killed or stopped."""

import os
import pkgutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CONNECTION = "flotilla_common.tensors.sender_connection"
_SENDER = "flotilla_learner.weights.adapters.weight_sender"
_PIECES = "flotilla_common.tensors.transfer_group:CollectiveGroup.begin_broadcast"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

# The functions that begin each stage, and the number of the call that does.
Stages = Mapping[str, tuple[Sequence[str], int]]

_RECEIVED = (_PIECES, "flotilla_common.tensors.buffer_group:BufferReceiver.begin_broadcast")
RECEIVER_STAGES: Stages = {
    "join": ((f"{_CONNECTION}:join_tcp_store",), 1),
    "open": ((f"{_CONNECTION}:SenderConnection._join_group",), 1),
    # The first request is for the group.
    "request": ((f"{_CONNECTION}:encode_request",), 2),
    "answer": ((f"{_CONNECTION}:SenderConnection._receive_tensors",), 1),
    "piece": (_RECEIVED, 1),
    "late_piece": (_RECEIVED, 6),
    "load": ((f"{_CONNECTION}:checksum64",), 2),
    "finish": (("__main__:note",), 1),
}

_SENT = (_PIECES, "flotilla_common.tensors.buffer_group:BufferSender.begin_broadcast")
SENDER_STAGES: Stages = {
    "open": ((f"{_SENDER}:EngineGroup._join_group",), 1),
    "request": ((f"{_SENDER}:WeightSender._pass_on",), 1),
    "answer": ((f"{_SENDER}:MappedFiles.map_file",), 1),
    "piece": (_SENT, 1),
    "late_piece": (_SENT, 7),
    # The second engine's, or that of the next publication.
    "finish": ((f"{_SENDER}:EngineGroup._send_publication",), 2),
}


def fail_at_piece(count: int, how: str, victim: int) -> None:
    """Have the process `victim` be killed or stopped when this one sends its piece number
    `count`."""
    _fail_at((_SENT, count), how, None, victim)


def fail_at_stage(stages: Stages, stage: str, how: str, armed: Path | None = None) -> None:
    """Have this process be killed or stopped, by `how`, when it comes to one of its stages: once
    the file `armed` is there, if given, which is removed then."""
    _fail_at(stages[stage], how, armed)


def _fail_at(
    place: tuple[Sequence[str], int], how: str, armed: Path | None, victim: int | None = None
) -> None:
    names, count = place
    left = [count]

    def fail_in_turn() -> None:
        if armed is not None and not armed.exists():
            return
        left[0] -= 1
        if left[0] == 0:
            if armed is not None:
                armed.unlink()
            os.kill(victim or os.getpid(), _SIGNALS[how])

    for name in names:
        module, _, path = name.partition(":")
        owner, _, function = path.rpartition(".")
        holder = pkgutil.resolve_name(f"{module}:{owner}" if owner else module)
        _call_before(holder, function, fail_in_turn)


def _call_before(owner: Any, name: str, first: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def call_both(*args: Any, **options: Any) -> Any:
        first()
        return original(*args, **options)

    setattr(owner, name, call_both)
