"""A training rank, a child of the learner service: `python -m services.learner.rank`.

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

from services.common.claimed_pipes import claim_pipes
from services.common.printable_text import print_visible
from services.learner.ranks import protocol

Inbox = queue.SimpleQueue[protocol.Message]
Result = protocol.Message | Future[protocol.Message]


def main() -> None:
    """Serve commands until `close` arrives or stdin ends."""
    commands, answers = claim_pipes()
    # Heavy imports only now: nothing they print can reach the channel.
    from services.learner.rank.worker import CommandDispatcher

    dispatcher = CommandDispatcher()
    inbox = Inbox()
    listener = threading.Thread(
        target=_read_commands, args=(commands, inbox, dispatcher.close), daemon=True
    )
    listener.start()
    channel = AnswerChannel(answers)
    while (message := inbox.get())["command"] != "close":
        channel.answer_message(dispatcher.answer_command, message)
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


class AnswerChannel:
    """Channel to the parent, for the main thread and for background threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._turn = threading.Lock()

    def answer_message(
        self, handle: Callable[[protocol.Message], Result], message: protocol.Message
    ) -> None:
        """Handle a message and answer it: at once, or when the work that it started has ended."""
        call = message["id"]
        outcome = _outcome_of(lambda: handle(message))
        begun = outcome.get("result")
        if isinstance(begun, Future):
            begun.add_done_callback(lambda ended: self._send(call, _outcome_of(ended.result)))
        else:
            self._send(call, outcome)

    def _send(self, call: int, outcome: protocol.Message) -> None:
        frame = protocol.encode_frame({"id": call, **outcome})
        with self._turn:
            self._stream.write(frame)
            self._stream.flush()


def _outcome_of(work: Callable[[], Result]) -> protocol.Message:
    try:
        return {"result": work()}
    # Boundary of the process: the parent must learn of any failure.
    except Exception as error:  # noqa: BLE001
        print_visible(traceback.format_exc(), end="", file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
