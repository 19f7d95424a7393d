"""Programs of the learner that other services run: they read its checkpoints and its store."""

from flotilla_common.process.python_command import python_command

EXPORT = "flotilla_learner.checkpoints.export_command"
RESTORE = "flotilla_learner.checkpoints.restore_command"
ACCEPT_LOSS = "flotilla_learner.checkpoints.accept_loss_command"
# Exit codes of RESTORE, besides 0: the store is out of reach, or never held anything of the run.
STORE_AWAY, NOTHING_STORED = 3, 4


def learner_command(program: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a program of the learner."""
    return python_command("-m", program, *arguments)
