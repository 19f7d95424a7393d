"""`flotilla demo`: trains a tiny policy on this machine, from any folder. If what that needs is not
installed, it makes an environment for it, and runs there."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from flotilla_common.process.python_command import python_command
from flotilla_common.process.spec_commands import COMMAND_LINE
from flotilla_launcher.cli.command_runner import BAD_SPEC, reports_errors
from flotilla_launcher.cli.demo_environment import DemoEnvironment, describe_installation
from flotilla_launcher.cli.shipped_files import find_shipped
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.cli.train import TrainOptions, train_policy

_NEEDED = (
    *("torch", "vllm", "mcp", "flotilla_rollout", "flotilla_learner", "flotilla_env_gateway"),
    "flotilla_environments",
)


@reports_errors(bad_spec=BAD_SPEC)
def run_demo(runs: Path, overrides: Sequence[str], options: TrainOptions, *, agreed: bool) -> int:
    """Train the demo's spec here, or become the same command in an environment that has all of it;
    with `agreed`, make that without a question."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if not missing:
        spec = find_shipped("deploy/runs/local.toml")
        return train_policy(spec, runs, overrides, replace(options, again=("demo",)))
    environment = DemoEnvironment.of_user()
    if environment.is_running:
        raise CommandError(
            f"{environment.folder} lacks {', '.join(missing)}: delete that folder and try again"
        )
    if not environment.is_made:
        if not agreed:
            _ask(describe_installation(environment, missing))
        environment.make()
    command = python_command("-m", COMMAND_LINE, *sys.argv[1:], executable=str(environment.python))
    os.execv(command[0], command)


def _ask(text: str) -> None:
    """Show what would be installed, and ask for it. Raises CommandError unless it is wished."""
    console = Terminal()
    console.print(text, soft_wrap=True)
    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError("nobody can answer here: nothing is installed; --yes agrees to it")
    console.print("Install it? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing is installed")
