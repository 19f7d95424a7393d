"""Imitation of demonstrations: `[learner.sft]` and `[learner.warm_start]`, and what specs with them
cannot ask for. Pure."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flotilla_common.spec.config import ConfigModel, given_keys, refuse_problems
from flotilla_common.spec.number_ranges import Count, Steps
from flotilla_common.spec.spec import PolicyConfig

if TYPE_CHECKING:
    from flotilla_learner.config.learner import LearnerConfig


class ImitationConfig(ConfigModel):
    """What is imitated, and in what portions."""

    # The table of the spec that it is.
    table: ClassVar[str]

    # A file of demonstrations, as `flotilla sft` writes.
    data: str = Field(min_length=1)
    # Sequences of one optimizer step. An epoch takes each once, so that the place of a step in the
    # data follows from its number alone.
    sequences_per_step: Count
    # Sequences beyond policy.max_model_len: left out, or cut off there.
    too_long: Literal["drop", "cut"] = "drop"
    # Share of the episodes that are not trained on, but scored: those of whole tasks, since
    # attempts at one task are alike.
    heldout: float = Field(default=0.0, ge=0, lt=1)
    # Steps between the scores of those; the last step is always followed by one.
    heldout_every: Steps = 10


class SftConfig(ImitationConfig):
    """Supervised fine-tuning, the whole of a run: `learner.steps` steps."""

    table: ClassVar[str] = "learner.sft"


class WarmStartConfig(ImitationConfig):
    """Supervised fine-tuning at the start of a run that then learns from attempts."""

    table: ClassVar[str] = "learner.warm_start"
    # Optimizer steps, before the `learner.steps` of reinforcement learning.
    steps: Steps
    # Learning rate of these steps; absent: that of `[learner.optimizer]`.
    lr: float | None = Field(default=None, gt=0, le=1)


# Keys of `[learner]` that only groups of attempts give a meaning.
_OF_GROUPS = "demonstrations are no groups of attempts at tasks; leave it out"
_UNUSED: Mapping[str, str] = {
    "tasks": "learner.sft.data is what is trained on; leave it out",
    "data": "no tasks are trained on; leave it out",
    **dict.fromkeys(
        (
            *("groups_per_step", "group_size", "min_group", "max_requeues"),
            *("constant_groups", "max_refill", "sampling"),
        ),
        _OF_GROUPS,
    ),
    "max_staleness": "nothing is sampled for a step, so nothing is stale; leave it out",
    "temperature": "the likelihood is that at temperature 1; leave it out",
    "top_k": "nothing is sampled to train on; leave it out",
    "top_p": "nothing is sampled to train on; leave it out",
    "guard": "no samples of engines are trained on, so none are compared; leave it out",
}
# Keys of `[learner.algorithm]` that hold for demonstrations too.
_SHARED = ("reduction", "norm_tokens")


def check_imitation(config: "LearnerConfig", policy: PolicyConfig) -> None:
    """Raise ConfigError with everything that SFT lacks, or that would be ignored."""
    head = 'learner.objective = "sft" does not work with this spec:'
    refuse_problems(head, _find_problems(config, policy))


def check_warm_start(config: "LearnerConfig", policy: PolicyConfig) -> None:
    """Raise ConfigError with everything that a warm start does not work with."""
    head = "learner.warm_start does not work with this spec:"
    refuse_problems(head, _find_unimitated(config, policy))


def _find_problems(config: "LearnerConfig", policy: PolicyConfig) -> Iterator[str]:
    yield from _find_unimitated(config, policy)
    for key in given_keys(config):
        if key == "guard" and given_keys(config.guard) in ([], ["mode"]):
            continue
        if key in _UNUSED:
            yield f"learner.{key}: {_UNUSED[key]}"
    for key in given_keys(config.algorithm):
        if key not in _SHARED:
            yield f"learner.algorithm.{key}: it is of reinforcement learning; leave it out"


def _find_unimitated(config: "LearnerConfig", policy: PolicyConfig) -> Iterator[str]:
    """Find what steps that imitate cannot do, whatever follows them."""
    if config.engine != "ranks":
        yield 'learner.engine: imitation is trained by own ranks only; set it to "ranks"'
    if policy.vision is not None:
        yield "policy.vision: demonstrations with pictures are not trained on yet; leave it out"
    if policy.routing_replay != "off":
        yield 'policy.routing_replay: demonstrations name no experts; set it to "off"'
