"""A sender of weights that fails as it sends: with the run `kill-3` it is killed at the third piece
of its life, with `stop-3` it is stopped there."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from services.common.tensors.buffer_group import BufferSender
from services.common.tensors.transfer_group import CollectiveGroup
from services.learner.weights.adapters import weight_sender
from services.learner.weights.sender_config import WeightSenderConfig

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main() -> None:
    line = sys.stdin.buffer.readline()
    name, count = WeightSenderConfig.from_line(line).run_id.split("-")
    left = [int(count)]

    def fail_later(kind: Any) -> None:
        begin = kind.begin_broadcast

        def begin_or_fail(self: Any, tensor: Tensor) -> Callable[[], object]:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), SIGNALS[name])
            return begin(self, tensor)

        kind.begin_broadcast = begin_or_fail

    fail_later(CollectiveGroup)
    fail_later(BufferSender)
    weight_sender.serve_engines(line)


if __name__ == "__main__":
    main()
