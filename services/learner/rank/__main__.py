"""A training rank, a child of the learner service: `python -m services.learner.rank`.

Not for use by hand: it reads framed commands from stdin and answers on stdout (see
`ranks/protocol.py`). Whatever libraries print goes to stderr. The process ends when its stdin
does, so it never outlives its parent."""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import BinaryIO

from services.common.printable_text import say
from services.learner.ranks import protocol

ORPHANED_EXIT_CODE = 3

Inbox = queue.SimpleQueue[protocol.Message]


def main() -> None:
    """Serve commands until `close` is said or stdin ends."""
    commands, answers = _claim_channel()
    # Heavy imports only now: nothing they print can reach the channel.
    from services.learner.rank.worker import CommandDispatcher

    dispatcher = CommandDispatcher()
    inbox = Inbox()
    listener = threading.Thread(
        target=_read_commands, args=(commands, inbox, dispatcher.close), daemon=True
    )
    listener.start()
    while (message := inbox.get())["command"] != "close":
        answers.write(protocol.encode_frame(_answer_message(dispatcher.answer_command, message)))
        answers.flush()
    dispatcher.close()
    # The interpreter would spend a second on taking torch apart.
    os._exit(0)


def _claim_channel() -> tuple[BinaryIO, BinaryIO]:
    """Take stdin and stdout for the channel; later uses of them by others are harmless."""
    commands = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return commands, answers


def _read_commands(commands: BinaryIO, inbox: Inbox, cleanup: Callable[[], None]) -> None:
    """Pass commands on; end the process at once when the parent is gone."""
    while (message := protocol.read_frame(commands)) is not None:
        inbox.put(message)
        if message["command"] == "close":
            return
    cleanup()
    os._exit(ORPHANED_EXIT_CODE)


def _answer_message(
    handle: Callable[[protocol.Message], protocol.Message], message: protocol.Message
) -> protocol.Message:
    try:
        return {"id": message["id"], "result": handle(message)}
    # The boundary of the process: whatever went wrong, the parent must hear of it.
    except Exception as error:  # noqa: BLE001
        say(traceback.format_exc(), end="", file=sys.stderr)
        return {"id": message["id"], "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
