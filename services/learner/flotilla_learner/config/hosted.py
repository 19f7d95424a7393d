"""What a spec with `learner.engine = "tinker"` cannot ask for, and what to set instead. Pure."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from flotilla_common.spec.config import given_keys, refuse_problems
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.lora import ALL_LINEAR

if TYPE_CHECKING:
    from flotilla_learner.config.algorithm import AlgorithmConfig
    from flotilla_learner.config.learner import LearnerConfig

# The service's name of each loss that it has.
SERVICE_LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "ppo_clip": "ppo",
        "cispo": "cispo",
        "gspo": "gspo",
        "importance_sampling": "importance_sampling",
    }
)
# The scale of its adapters is this divided by their rank.
SERVICE_ALPHA = 32.0
_OWN_RANKS = 'it is for learner.engine = "ranks"; leave it out'
# Keys of tables of which others are read.
_IGNORED_WEIGHTS = ("transfer", "transfer_port", "transfer_stall_s", "delta")
_READ_GUARD = ("mode", "tail_bound")


def check_hosted(config: "LearnerConfig", policy: PolicyConfig) -> None:
    """Raise ConfigError with everything that the service lacks, or that would be ignored."""
    problems = [
        *_policy_problems(policy),
        *_lora_problems(config),
        *_algorithm_problems(config.algorithm),
        *_ignored_problems(config),
    ]
    refuse_problems('learner.engine = "tinker" does not work with this spec:', problems)


def _policy_problems(policy: PolicyConfig) -> Iterator[str]:
    if policy.adapter_rank is not None:
        yield "policy.adapter_rank: the service publishes adapters by itself; leave it out"
    if policy.rope_scaling is not None:
        yield "policy.rope_scaling: the service has its own context; leave it out"
    if policy.routing_replay != "off":
        yield 'policy.routing_replay: the service names no experts; set it to "off"'
    if policy.vision is not None:
        yield "policy.vision: the service is shown no pictures; leave it out"


def _lora_problems(config: "LearnerConfig") -> Iterator[str]:
    lora = config.lora
    if lora is None:
        yield "learner.lora.rank: the service trains adapters; set their rank"
        return
    if lora.alpha != SERVICE_ALPHA:
        yield f"learner.lora.alpha: the service's is {SERVICE_ALPHA:g}; leave it out"
    if lora.target_modules != ALL_LINEAR:
        yield f'learner.lora.target_modules: the service adapts "{ALL_LINEAR}"; leave it out'


def _algorithm_problems(algorithm: "AlgorithmConfig") -> Iterator[str]:
    table = "learner.algorithm"
    if algorithm.plugins:
        yield f"{table}.plugins: the service runs no code of yours; leave it out"
    elif algorithm.loss not in SERVICE_LOSSES:
        known = ", ".join(SERVICE_LOSSES)
        yield f"{table}.loss: the service lacks {algorithm.loss!r}; it has {known}"
    if algorithm.advantage == "gae":
        yield f'{table}.advantage: the service has no critic; use another than "gae"'
    if algorithm.proximal != "behaviour":
        yield f'{table}.proximal: ratios are against the sampler there; set it to "behaviour"'
    if algorithm.entropy_coefficient:
        yield f"{table}.entropy_coefficient: the service has no entropy bonus; leave it out"
    for name in ("kl", "correction", "critic"):
        for key in given_keys(getattr(algorithm, name)):
            yield f"{table}.{name}.{key}: the service has no such term; leave it out"


def _ignored_problems(config: "LearnerConfig") -> Iterator[str]:
    if config.temperature != 1:
        yield "learner.temperature: the service trains at temperature 1; set it to 1"
    if config.top_k is not None:
        yield "learner.top_k: the service does not name what it sampled from; leave it out"
    if config.guard.mode != "off":
        yield 'learner.guard.mode: the service scores no samples again; set it to "off"'
    guard = [key for key in given_keys(config.guard) if key not in _READ_GUARD]
    weights = [key for key in given_keys(config.weights) if key in _IGNORED_WEIGHTS]
    for table, keys in (("guard", guard), ("weights", weights), ("rank", given_keys(config.rank))):
        for key in keys:
            yield f"learner.{table}.{key}: {_OWN_RANKS}"
