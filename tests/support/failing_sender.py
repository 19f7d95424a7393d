"""A sender of weights that is killed or stopped as it sends.

The run says how and where: `kill-3` at the third piece of its life; `stop-/FOLDER` at the stage
that a file in the folder is named after, once there is one."""

import sys
from pathlib import Path

from services.learner.weights.adapters import weight_sender
from services.learner.weights.sender_config import WeightSenderConfig
from tests.support.transfer_faults import SENDER_STAGES, fail_at_piece, fail_at_stage


def main() -> None:
    line = sys.stdin.buffer.readline()
    how, where = WeightSenderConfig.from_line(line).run_id.split("-", 1)
    if where.isdecimal():
        fail_at_piece(int(where), how)
    else:
        for stage in SENDER_STAGES:
            fail_at_stage(SENDER_STAGES, stage, how, armed=Path(where, stage))
    weight_sender.serve_engines(line)


if __name__ == "__main__":
    main()
