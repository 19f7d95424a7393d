"""Engines that span machines: impossible settings are refused with the fix."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_rollout.config.rollout import EngineConfig, RolloutConfig


def engine(**keys: Any) -> EngineConfig:
    section = {"max_input_length": 8, "max_generate_length": 8, "engine": keys}
    return parse_config(RolloutConfig, section, where="spec", section="rollout").engine


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engine(**keys)
    return str(caught.value)


def test_workers_are_shared_out_evenly_among_machines() -> None:
    assert engine(tensor_parallel=8, nodes=2).machine_workers == 4
    options = {"pipeline_parallel_size": 2}
    assert engine(tensor_parallel=8, options=options, nodes=2).machine_workers == 8
    assert "a multiple of 2" in refusal(tensor_parallel=3, nodes=2)
    assert "make 1 workers" in refusal(nodes=2)


def test_machines_on_a_public_network_are_refused() -> None:
    why = refusal(tensor_parallel=2, nodes=2, network="public")
    assert "set rollout.engine.network = 'private', or set nodes = 1" in why
    assert engine(tensor_parallel=2, network="public").nodes == 1


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"data_parallel": 2}, "take more replicas (launcher.rollout.replicas)"),
        ({"kind": "fake"}, "a fake engine has no workers"),
        ({"options": {"distributed_executor_backend": "mp"}}, "joined by Ray; leave it out"),
    ],
)
def test_what_several_machines_cannot_carry_names_the_fix(keys: dict[str, Any], why: str) -> None:
    assert why in refusal(tensor_parallel=2, nodes=2, **keys)
