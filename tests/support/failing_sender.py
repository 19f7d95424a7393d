"""A sender of weights that is killed or stopped as it sends, or that does so to another process.

The run's name selects how and where: `kill-3` at the third piece of its life; `kill-3-PID` that
process; `stop-/FOLDER` at the stage that a file in the folder is named after, once there is one."""

import os
import sys
from pathlib import Path

from flotilla_common.text.json_lines import decode_line
from flotilla_learner.weights.adapters import weight_sender
from flotilla_learner.weights.sender_config import WeightSenderConfig
from tests.support.transfer_faults import SENDER_STAGES, fail_at_piece, fail_at_stage


def main() -> None:
    line = sys.stdin.buffer.readline()
    how, where = decode_line(WeightSenderConfig, line).run_id.split("-", 1)
    if where.startswith("/"):
        for stage in SENDER_STAGES:
            fail_at_stage(SENDER_STAGES, stage, how, armed=Path(where, stage))
    else:
        count, *victim = map(int, where.split("-"))
        fail_at_piece(count, how, *victim or [os.getpid()])
    weight_sender.serve_engines(line)


if __name__ == "__main__":
    main()
