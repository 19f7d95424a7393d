"""The worker of an engine that only receives weights, on the device and over the backend of its
arguments.

It answers each line of its stdin: `join ADDRESS GROUP` with `joined`, and `receive MANIFEST` with
the SHA-256 of the tensors that came, or either with the error. After `pause MANIFEST` it prints
`middle` at the second tensor, and continues at the next line."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from flotilla_common.domain.policy import PolicyId
from flotilla_common.tensors.sender_connection import SenderConnection
from flotilla_common.text.printable_text import print_visible
from flotilla_common.weights.fingerprint import TensorEntry
from flotilla_common.weights.weight_transfer import OpenGroup


def receive(connection: SenderConnection, output: dict[str, Any], *, pauses: bool) -> str:
    entries = [TensorEntry(n, d, tuple(s), at, c) for n, d, s, at, c in output["rows"]]
    policy = PolicyId(output["run_epoch"], output["version"], bytes.fromhex(output["fingerprint"]))
    digest = hashlib.sha256()
    tensors = connection.request_weights(policy, entries, output["total_bytes"])
    for index, (name, tensor) in enumerate(tensors):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
        if pauses and index == 1:
            print_visible("middle")
            sys.stdin.readline()
    return digest.hexdigest()


def main() -> None:
    backend, device = sys.argv[1], torch.device(sys.argv[2])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # An engine has used its GPU long before it joins a sender.
        torch.zeros(1, device=device)
    connection = None
    while line := sys.stdin.readline():
        order, *words = line.split()
        try:
            if order == "join":
                address, group = words
                connection = SenderConnection(address, OpenGroup(group, 1, backend), 0, device)
                print_visible("joined")
            else:
                assert connection is not None
                output = json.loads(Path(words[0]).read_text())
                print_visible(receive(connection, output, pauses=order == "pause"))
        except RuntimeError as error:
            print_visible(f"{type(error).__name__}: {error}".splitlines()[0])


if __name__ == "__main__":
    main()
