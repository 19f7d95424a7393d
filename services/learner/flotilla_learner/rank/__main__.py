"""A training rank, a child of the learner service: `python -m flotilla_learner.rank`.

Not for use by hand: it reads framed commands from stdin and answers on stdout (see
`ranks/protocol.py`). Output of libraries goes to stderr. The process ends when its stdin
closes, so it never outlives its parent."""

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import BinaryIO

from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.text.printable_text import print_visible
from flotilla_learner.ranks import protocol

Inbox = queue.SimpleQueue[protocol.Message]
Result = protocol.Message | Future[protocol.Message]


def main() -> None:
    """Serve commands until `close` arrives or stdin ends."""
    parent = ParentChannel()
    # Heavy imports only now: nothing they print can reach the channel.
    from flotilla_learner.rank.worker import CommandDispatcher

    dispatcher = CommandDispatcher()
    inbox = Inbox()
    listener = threading.Thread(
        target=_read_commands, args=(parent.requests, inbox, dispatcher.close), daemon=True
    )
    listener.start()
    while (message := inbox.get())["command"] != "close":
        _answer_message(parent, dispatcher.answer_command, message)
    dispatcher.close()
    # The interpreter would spend a second tearing down torch.
    os._exit(0)


def _read_commands(commands: BinaryIO, inbox: Inbox, cleanup: Callable[[], None]) -> None:
    """Pass commands on; end the process at once when the parent is gone."""
    while (message := protocol.read_frame(commands)) is not None:
        inbox.put(message)
        if message["command"] == "close":
            return
    cleanup()
    os._exit(protocol.ORPHANED_EXIT_CODE)


def _answer_message(
    parent: ParentChannel, handle: Callable[[protocol.Message], Result], message: protocol.Message
) -> None:
    """Handle a message and answer it: at once, or when the work that it started has ended."""

    def send(outcome: protocol.Message) -> None:
        parent.write(protocol.encode_frame({"id": message["id"], **outcome}))

    outcome = _outcome_of(lambda: handle(message))
    begun = outcome.get("result")
    if isinstance(begun, Future):
        begun.add_done_callback(lambda ended: send(_outcome_of(ended.result)))
    else:
        send(outcome)


def _outcome_of(work: Callable[[], Result]) -> protocol.Message:
    try:
        return {"result": work()}
    # Boundary of the process: the parent must learn of any failure.
    except Exception as error:  # noqa: BLE001
        print_visible(traceback.format_exc(), end="", file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
