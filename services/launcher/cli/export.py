"""`flotilla export`: writes the model of a run in Hugging Face's format."""

import subprocess
from pathlib import Path

from services.common.process.child_environment import child_environment
from services.launcher import learner_programs
from services.launcher.cli.command_runner import reports_errors
from services.launcher.cli.run_source import find_run_dir


@reports_errors()
def export_model(run_id: str, step: int | None, out: Path, runs: Path, *, adapters: bool) -> int:
    """Write the model of one of a run's checkpoints; return the exit code."""
    run_dir = find_run_dir(run_id, runs)
    # Checkpoints belong to the learner, so its own program reads them.
    command = [
        *learner_programs.learner_command(learner_programs.EXPORT, str(run_dir), "--out", str(out))
    ]
    command += [] if step is None else ["--step", str(step)]
    command += ["--adapters"] if adapters else []
    return subprocess.run(command, check=False, env=child_environment(ours=True)).returncode
