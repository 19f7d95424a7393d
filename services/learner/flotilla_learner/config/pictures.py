"""What a spec with `[policy.vision]` cannot ask of our own ranks, and what to set instead. Pure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flotilla_common.spec.config import refuse_problems
from flotilla_common.spec.spec import PolicyConfig, VisionConfig

if TYPE_CHECKING:
    from flotilla_learner.config.learner import LearnerConfig


def check_pictures(config: "LearnerConfig", policy: PolicyConfig) -> None:
    """Raise ConfigError with everything that ranks do not train on pictures."""
    if policy.vision is None:
        return
    problems = _find_problems(config, policy, policy.vision)
    refuse_problems("policy.vision: ranks train on pictures, but not with:", problems)


def _find_problems(
    config: "LearnerConfig", policy: PolicyConfig, vision: VisionConfig
) -> Iterator[str]:
    if config.lora is not None and vision.is_trained:
        yield (
            "learner.lora: adapters are added to the text's layers alone, and all else is frozen;"
            ' set policy.vision.tower and projector to "frozen", or leave learner.lora out'
        )
    if config.algorithm.advantage == "gae":
        yield 'learner.algorithm.advantage: the critic of "gae" reads text only; use another'
    if policy.rope_scaling is not None:
        yield (
            "policy.rope_scaling: engines and ranks do not scale positions of pictures alike;"
            " leave it out"
        )
