"""Logs steps to a wandb run, as a learner does, and may be killed in the middle.

python -m tests.learner.tracking.adapters.wandb_process FOLDER FIRST LAST RESUMED END MODE
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.public_spec import redact_spec
from flotilla_learner.config.tracking import TrackingConfig
from flotilla_learner.ports import TrackedRun
from flotilla_learner.tracking.adapters.wandb import WandbTracker
from flotilla_learner.types import Histogram

SPEC = {"learner": {"steps": 4, "chat": {"webhook": "https://hooks.example/T0/secret"}}}


def main(folder: Path, first: int, last: int, *, resumed: bool, end: str, mode: str) -> None:
    config = TrackingConfig.model_validate({"mode": mode, "group": "tests", "tags": ["a"]})
    tracker = WandbTracker(config, "my-run", folder, redact_spec(SPEC))
    try:
        url = tracker.open_run(TrackedRun("0123abcd", resumed=resumed, logged_step=first - 1))
    except ConfigError as error:
        sys.exit(str(error))
    for step in range(first, last + 1):
        spread = Histogram((0.0, 1.0, 2.0), (3, step))
        tracker.log_metrics(step, {"policy/loss": step / 2}, {"reward/distribution": spread})
        if step == 2:
            # As an evaluation of version 2, which ends when step 2 was logged.
            tracker.log_metrics(step, {"eval/all/pass_at_1": 0.5}, {})
    print("its page:", url)
    print("wandb's process has", *variables_of_wandb())
    if end == "kill":
        # As long as wandb may keep a point in memory.
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.close()


def variables_of_wandb() -> list[str]:
    [service] = psutil.Process().children()
    return sorted(service.environ())


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        Path(given[0]),
        int(given[1]),
        int(given[2]),
        resumed=given[3] == "resumed",
        end=given[4],
        mode=given[5],
    )
