"""Names of a replica's machines and logs."""

import pytest

from flotilla_launcher.agent_protocol import is_side_log, key_of_node

LEARNER, ROLLOUT = ("learner", 0), ("rollout", 3)


def test_each_machine_of_each_replica_has_a_name_of_its_own() -> None:
    assert key_of_node(LEARNER, 0) == LEARNER
    assert key_of_node(LEARNER, 2) == ("learner-node", 2)
    assert key_of_node(ROLLOUT, 0) == ROLLOUT
    assert key_of_node(ROLLOUT, 1) == ("rollout-3-node", 1)


@pytest.mark.parametrize(
    ("key", "node", "ours"),
    [
        (LEARNER, 0, ["learner-rank-0", "learner-ray", "learner-weights"]),
        (LEARNER, 1, ["learner-node-1-rank-2", "learner-node-1-ray"]),
        (ROLLOUT, 0, ["rollout-3-ray", "rollout-3-machines", "rollout-3-node-0-worker-0"]),
        (ROLLOUT, 1, ["rollout-3-node-1-worker-0"]),
    ],
)
def test_a_log_beside_a_replicas_own_belongs_to_one_machine(
    key: tuple[str, int], node: int, ours: list[str]
) -> None:
    all_names = [
        *("learner-0", "learner-rank-0", "learner-ray", "learner-weights", "learner-node-1"),
        *("learner-node-1-rank-2", "learner-node-1-ray", "learner-node-2-rank-0", "learner-a_b"),
        *("rollout-3", "rollout-3-ray", "rollout-3-machines", "rollout-3-node-1"),
        *("rollout-3-node-0-worker-0", "rollout-3-node-1-worker-0", "rollout-30-ray"),
        *("rollout-3-node-2-worker-0", "rollout-30-node-1-worker-0", "../learner-x"),
    ]
    assert [name for name in all_names if is_side_log(key, node, name)] == ours
