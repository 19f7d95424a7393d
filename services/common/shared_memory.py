"""What a run's files in shared memory are called."""

import hashlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_name(run_id: str, run_dir: Path) -> str:
    """Begins the name of each file of that run, and of no other run on this machine.

    Two runs of one spec may begin in the same second, in different folders, and have one id; an
    id may begin another. The digest of the run's folder tells them apart.
    """
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()
    return f"flotilla-{run_id}-{digest[:12]}"
