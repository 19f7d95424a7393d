"""The worker of an engine that only receives weights: `ADDRESS GROUP MANIFEST [kill|stop]`.

Reads versions from stdin, one a line, and answers each with the SHA-256 of the tensors that came,
or with the error; with a signal it fails at its second tensor."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from services.common.domain.policy import PolicyId
from services.common.fingerprint import TensorEntry
from services.common.printable_text import say
from services.common.tensors.sender_connection import SenderConnection
from services.common.weight_transfer import OpenGroup
from tests.support.failing_sender import SIGNALS


def receive(connection: SenderConnection, told: dict[str, Any], fails: str | None) -> str:
    entries = [TensorEntry(n, d, tuple(s), at, c) for n, d, s, at, c in told["rows"]]
    policy = PolicyId(told["run_epoch"], told["version"], bytes.fromhex(told["fingerprint"]))
    digest = hashlib.sha256()
    tensors = connection.request_weights(policy, entries, told["total_bytes"])
    for index, (name, tensor) in enumerate(tensors):
        digest.update(name.encode() + tensor.numpy().tobytes())
        if fails is not None and index == 1:
            os.kill(os.getpid(), SIGNALS[fails])
    return digest.hexdigest()


def main() -> None:
    address, group, *how = sys.argv[1:]
    opening = OpenGroup(group, 1, "gloo")
    connection = SenderConnection(address, opening, 0, torch.device("cpu"))
    say("joined")
    for line in sys.stdin:
        told = json.loads(Path(line.strip()).read_text())
        try:
            say(receive(connection, told, how[0] if how else None))
        except RuntimeError as error:
            say(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
