"""A sender of weights that fails as it sends: with the run `kill-3` it is killed at the third piece
of its life, with `stop-3` it is stopped there."""

import os
import signal
import sys

from torch import Tensor

from services.common.tensors.transfer_group import TransferGroup
from services.learner.weights.adapters import weight_sender
from services.learner.weights.sender_config import WeightSenderConfig

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main() -> None:
    line = sys.stdin.buffer.readline()
    name, count = WeightSenderConfig.from_line(line).run_id.split("-")
    broadcast, left = TransferGroup.broadcast, [int(count)]

    def fail_later(self: TransferGroup, tensor: Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), SIGNALS[name])
        broadcast(self, tensor)

    TransferGroup.broadcast = fail_later
    weight_sender.serve_engines(line)


if __name__ == "__main__":
    main()
