"""The rollout's section as the sampling service reads it."""

from collections.abc import Mapping

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_rollout.config.sampling import SamplingProcessConfig

SHARED = SharedConfig(name="x", policy=PolicyConfig(model="m", max_model_len=64))


def parse(section: Mapping[str, object]) -> SamplingProcessConfig:
    config = parse_config(SamplingProcessConfig, section, where="spec", section="rollout")
    config.check(SHARED)
    return config


def test_what_only_a_worker_needs_may_be_absent_or_there() -> None:
    assert parse({}).sampling.max_rank == 32
    whole = {"max_input_length": 99, "max_generate_length": 8, "sampling": {"max_rank": 0}}
    assert parse(whole).sampling.max_rank == 0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "fake"}, r"rollout\.engine\.kind: fake serves no samplers"),
        ({"data_parallel": 2}, r"rollout\.engine\.data_parallel: samplers are served by one"),
        (
            {"device": "cpu", "seeded": False, "options": {"enable_chunked_prefill": True}},
            r"rollout\.engine\.options\.enable_chunked_prefill: on a CPU",
        ),
    ],
)
def test_engines_that_serve_no_samplers_are_refused(
    engine: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"engine": engine})
