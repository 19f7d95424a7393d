"""Every number of every configuration: none is infinite, and each has a range with two ends."""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, canonical_json, parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_rollout.config.rollout import RolloutConfig

ROOTS: dict[str, type[ConfigModel]] = {
    "": SharedConfig,
    "env_gateway": EnvGatewayConfig,
    "rollout": RolloutConfig,
    "learner": LearnerConfig,
    "launcher": LauncherConfig,
}
# What a table needs besides the number under test.
SCAFFOLD: dict[str, dict[str, Any]] = {
    "": {"name": "x", "policy": {"model": "m", "max_model_len": 8}},
    "policy": {"model": "m", "max_model_len": 8},
    "rollout": {"max_input_length": 8, "max_generate_length": 8},
    "learner": {"tasks": "t.json", "steps": 1, "groups_per_step": 1, "group_size": 2},
    # For named rewards, which a custom estimator may read.
    "learner.algorithm": {"plugins": ["mine"]},
    "learner.eval.sets.0": {"name": "heldout", "tasks": "t.json"},
    "learner.sft": {"data": "d.npz", "sequences_per_step": 1},
    "learner.warm_start": {"data": "d.npz", "sequences_per_step": 1, "steps": 1},
    "learner.teacher": {"url": "http://host/v1"},
    "learner.judge": {"url": "http://host/v1", "model": "m", "max_calls": 1},
    "learner.sampling": {"mixing": "weights", "weights": {"other": 1}},
    "launcher.token_prices": {"prompt": 1.0, "sample": 1.0, "train": 1.0},
    "env_gateway.servers.0": {"url": "http://host"},
    "env_gateway.backends.openenv": {"url": "http://host"},
}
# What the table around another one needs, instead.
AROUND: dict[str, dict[str, Any]] = {"learner.sft": {"objective": "sft", "steps": 1}}
# Where 0 is an answer, and which.
ZERO_IS_MEANT = {
    "env_gateway.warm_starts.size": "none is started ahead",
    "seed": "one seed of many",
    "env_gateway.limits.reserved_share": "one environment may hold all calls",
    "env_gateway.retry.budget_ratio": "no retries but those that cap allows",
    "launcher.env_gateway.gpus": "what is there",
    "launcher.rollout.gpus": "what is there",
    "launcher.learner.gpus": "what is there",
    "launcher.token_prices.prompt": "not billed",
    "launcher.token_prices.sample": "not billed",
    "launcher.token_prices.train": "not billed",
    "launcher.max_restarts": "the first failure is the last",
    "launcher.clean_s": "one look",
    "launcher.notify.tail_lines": "no log in a message",
    "launcher.sky.registry_port": "any free one",
    "launcher.sky.provision.backoff_s": "no pause",
    "rollout.retry_pause_s": "no pause",
    "rollout.limits.parse_errors": "the first one is the end",
    "rollout.sampling.max_rank": "no adapters",
    "learner.max_staleness": "strictly on policy",
    "learner.max_requeues": "a dropped group is given up",
    "learner.weights.port": "any free one",
    "learner.weights.transfer_port": "any free one",
    "learner.algorithm.kl.coefficient": "no KL",
    "learner.algorithm.clip_cov.low": "any that go together",
    "learner.algorithm.overlong.soft_buffer": "unused without soft_limit",
    "learner.algorithm.critic.trace_decay": "TD(0)",
    "learner.algorithm.critic.warmup_steps": "none",
    "learner.algorithm.entropy_coefficient": "no bonus",
    "learner.sft.heldout": "nothing is held out",
    "learner.warm_start.heldout": "nothing is held out",
    "learner.algorithm.rewards": "not learned from",
    "learner.algorithm.distillation.top_k": "estimated from the sampled tokens",
    "learner.lora.dropout": "none, and nothing else is taken",
    "learner.optimizer.betas": "no moment",
    "learner.optimizer.weight_decay": "none",
    "learner.optimizer.grad_clip": "no clipping",
    "learner.optimizer.warmup_steps": "none",
    "learner.rank.post_update_tokens": "nothing is scored again",
    "learner.guard.audit_tokens": "the run is unwatched after its start",
    "learner.eval.sets.0.temperature": "greedy",
    "learner.eval.every": "none during training",
    "learner.select.difficulty": "a level of that name",
    "learner.tracking.episodes_every": "no table",
    "learner.sampling.weights": "leaves an environment out",
    "learner.sampling.min_per_env": "no floor",
    "learner.sampling.quarantine_share": "nothing is quarantined",
    "learner.sampling.difficulty.impossible": "an end of a share",
    "learner.sampling.difficulty.probe_share": "parked tasks stay parked",
    "learner.alarms.signal_ratio": "an end of a share",
    "learner.alarms.solved_share": "an end of a share",
    "learner.alarms.no_grade_rate": "an end of a share",
    "learner.alarms.tool_error_rate": "an end of a share",
    "learner.alarms.stale_share": "an end of a share",
    "learner.alarms.entropy_share": "an end of a share",
    "learner.alarms.eval_fall": "an end of a share",
}
NEGATIVE_IS_MEANT = {
    "learner.algorithm.clip_cov.low": "also some that do not go together",
    "learner.algorithm.entropy_coefficient": "sharpens the policy",
    "learner.algorithm.rewards": "a cost",
}
# Options of another library, whose meaning is unknown here: they must only be finite.
FOREIGN = {"learner.checkpoint.remote_options": "of a file system"}


@dataclass(frozen=True, slots=True)
class Number:
    """A key that holds a number; `wrap` makes the table of its root from a value."""

    root: str
    key: str
    kind: type
    wrap: Callable[[Any], Any]

    def refusal(self, value: Any) -> str:
        """Return the error for a value; empty if it is accepted."""
        try:
            parse_config(ROOTS[self.root], self.wrap(value), where="spec", section=self.root)
        except ConfigError as error:
            problems = str(error).splitlines()[1:]
            assert all(self.key in problem for problem in problems), f"{value}: {error}"
            return str(error)
        return ""


def _joined(key: str, part: str) -> str:
    return f"{key}.{part}" if key else part


def _member(table: str, name: str, outer: Callable[[Any], Any], value: Any) -> Any:
    beside = AROUND.get(_joined(table, name), SCAFFOLD.get(table, {}))
    return outer({**beside, name: value})


def numbers(root: str, annotation: Any, key: str, wrap: Callable[[Any], Any]) -> Iterator[Number]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        for name, field in annotation.model_fields.items():
            down = partial(_member, key, name, wrap)
            yield from numbers(root, field.annotation, _joined(key, name), down)
    elif annotation in (int, float):
        yield Number(root, key, annotation, wrap)
    elif origin is Annotated:
        yield from numbers(root, inner[0], key, wrap)
    elif origin in (Union, types.UnionType):
        for each in inner:
            yield from numbers(root, each, key, wrap)
    elif origin is tuple:
        width = 1 if inner[-1] is ... else len(inner)
        index = ".0" if _is_table(inner[0]) else ""
        yield from numbers(root, inner[0], f"{key}{index}", lambda v: wrap([v] * width))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        beside = {} if _is_table(inner[1]) else {"other": 1}
        yield from numbers(
            root,
            inner[1],
            f"{key}.x" if _is_table(inner[1]) else key,
            lambda v: wrap({**beside, "x": v}),
        )


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigModel)


NUMBERS = [
    number for root, model in ROOTS.items() for number in numbers(root, model, root, lambda v: v)
]


def test_the_walk_finds_the_numbers_of_all_services() -> None:
    keys = {number.key for number in NUMBERS}
    assert len(keys) > 130
    assert keys >= {*ZERO_IS_MEANT, *NEGATIVE_IS_MEANT, *FOREIGN}
    for key in (
        "seed",
        "policy.max_model_len",
        "learner.optimizer.lr",
        "learner.optimizer.betas",
        "learner.algorithm.correction.token_mask",
        "learner.eval.sets.0.temperature",
        "launcher.sky.learner.any_of.0.max_hourly_cost",
        "rollout.engine.block_size",
        "env_gateway.environments.x.max_calls",
        "env_gateway.servers.0.start_timeout_s",
    ):
        assert key in keys


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{n.key}-{n.kind.__name__}")
def test_every_number_is_finite_and_has_a_range(number: Number) -> None:
    """B53."""
    foreign = number.key in FOREIGN
    for value in (float("nan"), float("inf"), -float("inf")):
        assert number.key in number.refusal(value), value
    for value in (10**30, -(10**30)) if number.kind is int else (1e300, -1e300):
        assert foreign or number.key in number.refusal(value), value
    for value, meant in ((0, ZERO_IS_MEANT), (-1, NEGATIVE_IS_MEANT)):
        text = number.refusal(number.kind(value))
        taken = number.key in meant or foreign
        assert taken is not bool(text), f"{value}: {text or 'taken'}"


def test_a_number_that_json_cannot_express_is_named_by_its_whole_key() -> None:
    spec = {"learner": {"optimizer": {"lr": float("nan")}, "eval": {"sets": [float("inf")]}}}
    with pytest.raises(ConfigError) as caught:
        canonical_json(spec, where="spec.toml")
    assert str(caught.value).splitlines() == [
        "spec.toml: 2 problems",
        "  learner.optimizer.lr: must be a finite number; got nan (leave the key out for its"
        " default)",
        "  learner.eval.sets.0: must be a finite number; got inf (leave the key out for its"
        " default)",
    ]


def test_a_clip_below_no_ratio_and_a_run_of_no_steps_are_refused() -> None:
    table = {**SCAFFOLD["learner"], "steps": 0, "algorithm": {"clip_low": 1.5}}
    with pytest.raises(ConfigError) as caught:
        parse_config(LearnerConfig, table, where="spec", section="learner")
    assert "learner.steps: Input should be greater than or equal to 1; got 0" in str(caught.value)
    assert "learner.algorithm.clip_low: Input should be less than or equal to 1; got 1.5" in str(
        caught.value
    )
