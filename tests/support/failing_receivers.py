"""Engines' workers that are killed or stopped as they receive weights, each a fork of this process,
which has loaded all that they need; its argument is the backend.

Each line of stdin is `PLACE ADDRESS HOW STAGE MANIFEST...`, and is answered with the number of a
process that is killed or stopped, by HOW, when it comes to that stage; with HOW `never` it is not.
It receives the publications one after another, each in a new group with the sender at ADDRESS. What
has come of the first is the text of the file `PLACE.0`: the digest of its tensors, or the error."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from flotilla_common.tensors.sender_connection import SenderConnection
from flotilla_common.text.printable_text import print_visible
from flotilla_common.weights.weight_transfer import OpenGroup
from tests.support.receiving_worker import receive
from tests.support.transfer_faults import RECEIVER_STAGES, fail_at_stage


def run_receiver(place: str, address: str, how: str, stage: str, *manifests: str) -> None:
    if how != "never":
        fail_at_stage(RECEIVER_STAGES, stage, how)
    for index, manifest in enumerate(manifests):
        opening = OpenGroup(f"{Path(place).name}.{index}", 1, sys.argv[1])
        try:
            connection = SenderConnection(address, opening, 0, torch.device("cpu"))
            output = json.loads(Path(manifest).read_text())
            note(f"{place}.{index}", receive(connection, output, pauses=False))
        except RuntimeError as error:
            note(f"{place}.{index}", f"{type(error).__name__}: {error}")


def note(path: str, text: str) -> None:
    """Write a file that appears only once it is whole."""
    begun = Path(f"{path}.begun")
    begun.write_text(text)
    begun.rename(path)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            run_receiver(*line.split())
            os._exit(0)
        print_visible(str(child))


if __name__ == "__main__":
    main()
