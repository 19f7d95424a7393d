"""Steps after which a run saves a checkpoint."""

from services.learner.config.learner import CheckpointConfig


def is_checkpoint_due(version: int, config: CheckpointConfig) -> bool:
    return config.every > 0 and version > 0 and version % config.every == 0
