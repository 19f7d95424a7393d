"""Programs of the learner that other services run: they read its checkpoints and its store."""

from importlib.util import find_spec

from flotilla_common.process.extras import install_command
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.errors import ConfigError

EXPORT = "flotilla_learner.checkpoints.export_command"
RESTORE = "flotilla_learner.checkpoints.restore_command"
ACCEPT_LOSS = "flotilla_learner.checkpoints.accept_loss_command"
# Exit codes of RESTORE, besides 0: the store is out of reach, or never held anything of the run.
STORE_AWAY, NOTHING_STORED = 3, 4


def learner_command(program: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a program of the learner. Raises ConfigError if the learner is not
    installed here."""
    if find_spec(program.partition(".")[0]) is None:
        raise ConfigError(
            "what the learner has written is read by its own programs, which are not installed"
            f" here: {install_command('learner')}"
        )
    return python_command("-m", program, *arguments)
