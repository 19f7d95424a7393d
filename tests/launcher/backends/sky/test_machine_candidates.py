"""The machines that an attempt requests, and the wishes that are refused."""

from typing import Any

import pytest

from flotilla_launcher.backends.sky import machine_candidates
from flotilla_launcher.backends.sky.status import Place
from flotilla_launcher.backends.sky.task_documents import describe_machine
from flotilla_launcher.config.sky import Machine, Machines
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT
from tests.support.run_specs import bare_spec
from tests.support.sky_launches import config

_A, _B, _C = (Machine(infra=f"aws/{region}") for region in "abc")


def test_the_first_attempt_leaves_the_choice_to_skypilot() -> None:
    machines = Machines(any_of=(_A, _B))
    assert machine_candidates.machines_for_attempt(machines, 1) is machines


def test_each_further_attempt_begins_one_candidate_later() -> None:
    machines = Machines(any_of=(_A, _B, _C))
    heads = [
        machine_candidates.machines_for_attempt(machines, attempt).ordered[0]
        for attempt in (2, 3, 4, 5)
    ]
    assert heads == [_B, _C, _A, _B]
    assert machine_candidates.machines_for_attempt(machines, 3).ordered == (_C, _A, _B)


def test_a_single_candidate_is_tried_again() -> None:
    machines = Machines(ordered=(_A,))
    assert machine_candidates.machines_for_attempt(machines, 4) is machines


@pytest.mark.parametrize(
    ("machine", "settings", "nodes", "part"),
    [
        ({"infra": "runpod"}, {}, 2, "runpod has no multi-node clusters; set num_nodes = 1"),
        ({"infra": "vast"}, {}, 2, "vast has no multi-node clusters; set num_nodes = 1"),
        ({"infra": "verda"}, {}, 2, "verda has no multi-node clusters; set num_nodes = 1"),
        ({"infra": "lambda", "use_spot": True}, {}, 1, "no spot machines; set use_spot = false"),
        ({"infra": "slurm/x"}, {"network": "public"}, 1, 'set launcher.sky.network = "private"'),
    ],
)
def test_an_impossible_wish_is_refused_with_its_key_and_the_fix(
    machine: dict[str, Any], settings: dict[str, Any], nodes: int, part: str
) -> None:
    learner = {"any_of": [{"infra": "aws"}, machine], "num_nodes": nodes}
    problems = machine_candidates.check_candidates(config(learner=learner, **settings).sky, LEARNER)
    assert any(p.startswith("launcher.sky.learner.any_of.1: ") and part in p for p in problems)


@pytest.mark.parametrize(
    ("candidates", "where"),
    [
        ({}, "launcher.sky.rollout"),
        ({"any_of": [{"accelerators": "H100:1"}]}, "launcher.sky.rollout.any_of.0"),
        ({"ordered": [{"infra": "slurm/x"}]}, "launcher.sky.rollout.ordered.0"),
    ],
)
def test_the_one_cloud_refuses_what_it_lacks_though_no_candidate_names_it(
    candidates: dict[str, Any], where: str
) -> None:
    sky = config(rollout=candidates, cloud="slurm", network="public").sky
    refused = f'{where}: slurm opens no ports; set launcher.sky.network = "private"'
    assert machine_candidates.check_candidates(sky, ROLLOUT) == [refused]
    private = config(rollout=candidates, cloud="slurm").sky
    assert machine_candidates.check_candidates(private, ROLLOUT) == []
    # Candidates at other clouds are dropped, so nothing of theirs is refused.
    both = {"any_of": [{"infra": "aws"}, {"infra": "slurm/x"}]}
    there = config(rollout=both, cloud="aws", network="public").sky
    assert machine_candidates.check_candidates(there, ROLLOUT) == []


@pytest.mark.parametrize(
    ("service", "who"), [(LEARNER, "ranks"), (ROLLOUT, "workers of an engine")]
)
def test_a_replica_of_several_machines_has_them_in_a_private_network(
    service: str, who: str
) -> None:
    machines = {service: {"num_nodes": 2, "any_of": [{"infra": "aws"}]}}
    assert machine_candidates.check_candidates(config(**machines).sky, service) == []
    (problem,) = machine_candidates.check_candidates(
        config(**machines, network="public").sky, service
    )
    assert problem.startswith(f"launcher.sky.{service}: num_nodes = 2: {who} of several machines")
    assert 'set launcher.sky.network = "private"' in problem


def test_a_gateway_is_one_machine() -> None:
    sky = config(env_gateway={"num_nodes": 2}).sky
    (problem,) = machine_candidates.check_candidates(sky, GATEWAY)
    assert problem.startswith("launcher.sky.env_gateway: num_nodes = 2: a replica of env_gateway")
    assert "scale by launcher.env_gateway.replicas" in problem


def test_the_ports_where_ray_joins_machines_are_ports() -> None:
    several = {"num_nodes": 2, "any_of": [{"infra": "aws"}]}
    highest = config(rollout=several, port=65277).sky
    assert machine_candidates.check_candidates(highest, ROLLOUT) == []
    (problem,) = machine_candidates.check_candidates(
        config(rollout=several, port=65278).sky, ROLLOUT
    )
    assert "set launcher.sky.port to 65277 or lower" in problem
    assert machine_candidates.check_candidates(config(port=65278).sky, ROLLOUT) == []


@pytest.mark.parametrize(("service", "table"), [(LEARNER, "rank"), (ROLLOUT, "engine")])
def test_a_spec_names_no_other_number_of_machines_than_are_found(service: str, table: str) -> None:
    two = config(**{service: {"num_nodes": 2, "any_of": [{"infra": "aws"}]}})
    for named in ({}, {table: {"nodes": 1}}, {table: {"nodes": 2}}):
        assert machine_candidates.check_machines(bare_spec({service: named}, two), service) == []
    three = bare_spec({service: {table: {"nodes": 3}}}, two)
    (problem,) = machine_candidates.check_machines(three, service)
    assert problem.startswith(
        f"{service}.{table}.nodes = 3, but launcher.sky.{service}.num_nodes = 2"
    )
    one = config()
    several = bare_spec({service: {table: {"nodes": 2}}}, one)
    assert machine_candidates.check_machines(several, service)
    assert machine_candidates.check_machines(bare_spec({}, one), GATEWAY) == []


def test_what_can_be_had_is_not_refused() -> None:
    assert machine_candidates.check_candidates(config().sky, ROLLOUT) == []


def test_machines_of_two_clouds_share_no_private_network() -> None:
    elsewhere = {"ordered": [{"infra": "runpod"}]}
    (warning,) = machine_candidates.check_shared_network(config(rollout=elsewhere).sky)
    assert "lambda, runpod" in warning and 'network = "public"' in warning
    assert machine_candidates.check_shared_network(config().sky) == []
    assert (
        machine_candidates.check_shared_network(config(rollout=elsewhere, network="public").sky)
        == []
    )


def test_a_machine_is_described_with_all_that_was_wished_for() -> None:
    wish = Machine(
        infra="gcp/us-central1",
        accelerators="H200:4",
        memory="200+",
        disk_size=500,
        disk_tier="best",
        image_id="docker:x",
        use_spot=True,
    )
    expected = "gcp/us-central1 H200:4, 200+ GiB, disk 500 GB of tier best, image docker:x, spot"
    assert describe_machine(wish) == expected
    assert (
        describe_machine(Machine(cpus="4+", disk_tier="low"))
        == "any cloud 4+ CPUs, disk of tier low"
    )


def _lose(machines: Machines, lost: Place, *regions: str) -> list[str | None]:
    prices = {"aws/a": 3.0, "aws/b": 2.0, "aws/c": 1.0}
    kept = machine_candidates.with_place_last(
        machines, lost, lambda _: regions, lambda machine: prices.get(machine.infra or "")
    )
    assert kept.num_nodes == machines.num_nodes
    return [machine.infra for machine in kept.ordered]


def test_the_place_of_a_lost_machine_is_tried_last_and_the_others_in_their_order() -> None:
    machines = Machines(ordered=(_A, _B, _C), num_nodes=2)
    assert _lose(machines, Place("aws", "a")) == ["aws/b", "aws/c", "aws/a"]
    assert _lose(machines, Place("aws", "b")) == ["aws/a", "aws/c", "aws/b"]
    assert _lose(machines, Place("gcp", "a")) == ["aws/a", "aws/b", "aws/c"]


def test_of_candidates_in_any_order_the_cheapest_that_are_elsewhere_come_first() -> None:
    assert _lose(Machines(any_of=(_A, _B, _C)), Place("aws", "c")) == ["aws/b", "aws/a", "aws/c"]


def test_a_candidate_without_a_region_is_divided_into_those_of_the_catalog() -> None:
    anywhere = Machines(ordered=(Machine(infra="aws"),))
    assert _lose(anywhere, Place("aws", "b"), "a", "b", "c") == ["aws/a", "aws/c", "aws/b"]
    # Without a catalog no other region is known, and any may do.
    assert _lose(anywhere, Place("aws", "b")) == ["aws"]
    any_cloud = Machines(ordered=(Machine(accelerators="H100:1"),))
    assert _lose(any_cloud, Place("aws", "b"), "a", "b") == ["aws/a", None]


def test_only_the_zone_of_a_lost_machine_is_avoided_where_candidates_name_zones() -> None:
    zones = Machines(ordered=(Machine(infra="aws/a/a1"), Machine(infra="aws/a/a2")))
    assert _lose(zones, Place("aws", "a", zone="a1")) == ["aws/a/a2", "aws/a/a1"]
