"""A rollout at a Tinker service: settings that nothing there heeds are refused by name."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_rollout.config.rollout import RolloutConfig
from flotilla_rollout.work.options import BurnInLengths


def section(**keys: Any) -> RolloutConfig:
    given = {"max_input_length": 48, "max_generate_length": 8, "engine": {"kind": "tinker"}} | keys
    return parse_config(RolloutConfig, given, where="spec", section="rollout")


def shared(**policy: Any) -> SharedConfig:
    return SharedConfig(name="x", policy=PolicyConfig(model="m", max_model_len=64, **policy))


def test_a_plain_section_fits() -> None:
    section(engine={"kind": "tinker", "seeded": False}).check(shared())


@pytest.mark.parametrize(
    ("keys", "policy", "told"),
    [
        ({"engine": {"kind": "tinker", "device": "cpu"}}, {}, "rollout.engine.device: it is an"),
        ({"engine": {"kind": "tinker", "tensor_parallel": 2}}, {}, "rollout.engine.tensor_para"),
        ({"engine": {"kind": "tinker", "options": {"a": 1}}}, {}, "rollout.engine.options: it is"),
        ({"burn_in": {"answer_tokens": 4}}, {}, "rollout.burn_in.answer_tokens: there is no mem"),
        ({}, {"adapter_rank": 8}, "policy.adapter_rank: learner.lora.rank says it"),
        ({}, {"routing_replay": "replay"}, "policy.routing_replay: the service names no experts"),
        (
            {},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "policy.rope_scaling: the service has positions of its own",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    keys: dict[str, Any], policy: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**keys).check(shared(**policy))
    assert 'rollout.engine.kind = "tinker": leave out\n' in str(caught.value)
    assert told in str(caught.value)


def test_all_of_it_is_told_together() -> None:
    engine = {"kind": "tinker", "device": "cpu", "max_num_seqs": 4}
    with pytest.raises(ConfigError) as caught:
        section(engine=engine).check(shared(adapter_rank=8))
    assert len(str(caught.value).splitlines()) == 4


def test_the_burn_in_asks_for_one_token_after_the_longest_prompt() -> None:
    assert section().burn_in_lengths(64) == BurnInLengths(48, 1, 600.0)
    assert section(max_input_length=63).burn_in_lengths(64) == BurnInLengths(63, 1, 600.0)
    assert section(burn_in={"enabled": False}).burn_in_lengths(64) is None
