"""`python -m tests.sky.materials FOLDER`: makes a small policy and its tasks.

Not in a test itself: SkyPilot's environment has no tensors.
"""

import sys
from pathlib import Path

from tests.faults.harness import write_tasks
from tests.faults.small_policy import write_policy


def main() -> None:
    folder = Path(sys.argv[1])
    policy = folder / "policy"
    policy.mkdir(parents=True)
    tasks = write_tasks(folder)
    write_policy(policy, [tasks.read_text()])
    # The nodes' user reads it.
    (policy / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
