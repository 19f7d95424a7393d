"""Settings of the ranks that do not go together."""

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.learner import LearnerConfig


def problem(**learner: object) -> str:
    values = {"tasks": "t", "steps": 1, "groups_per_step": 1, "group_size": 2, **learner}
    with pytest.raises(ConfigError) as caught:
        parse_config(LearnerConfig, values, where="[learner]")
    return str(caught.value)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"rank": {"shard": True, "nodes": 2}}, "set learner.rank.shard_within_node = true"),
        (
            {"rank": {"offload_activations": True}},
            "set that, too",
        ),
        (
            {"rank": {"compile": True, "gradient_checkpointing": "selective"}},
            'gradient_checkpointing to "off" or "full"',
        ),
        ({"rank": {"shard_within_node": True}}, "no effect without learner.rank.shard"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_fix(
    learner: dict[str, object], message: str
) -> None:
    assert message in problem(**learner)
