"""A run's replicas as SkyPilot's task documents."""

import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import yaml

from flotilla_launcher.agent.arguments import parse_arguments
from flotilla_launcher.backends.sky import cost_estimate, names, task_documents
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, RunMode
from tests.support.sky_launches import RUN_ID, config, launch

_KEYS = ((LEARNER, 0), (GATEWAY, 0), (ROLLOUT, 3))


def _site(**sky: Any) -> task_documents.RunSite:
    return task_documents.site_from_launch(
        launch((LEARNER, 0), config(**sky)), "abc", "10.0.0.5:4000", "/code"
    )


def test_secrets_are_named_and_their_values_are_nowhere() -> None:
    spec = {
        "env_gateway": {"backend": "fleet", "fleet": {"base_url": "$FLEET_URL"}},
        "learner": {"tracking": {"backends": ["wandb"]}},
    }
    for key in _KEYS:
        wish = launch(key, config(secrets=["HF_TOKEN"]), spec)
        document = task_documents.replica_task(
            task_documents.site_from_launch(wish, "abc", "h:1", "/code"), key
        )
        assert set(document["secrets"].values()) == {None}
        assert {"FLOTILLA_TOKEN", "FLOTILLA_TLS", "HF_TOKEN"} <= set(document["secrets"])
        assert ("FLEET_API_KEY" in document["secrets"]) == (key[0] == GATEWAY)
        assert ("WANDB_API_KEY" in document["secrets"]) == (key[0] == LEARNER)
        assert ("FLEET_URL" in document["secrets"]) == (key[0] == GATEWAY)
        assert "canary" not in cost_estimate.dump_yaml([document])
        assert "envs" not in document


@pytest.mark.parametrize("key", _KEYS)
@pytest.mark.parametrize("network", ["private", "public"])
def test_a_machines_script_is_valid_shell_and_ends_by_itself(
    key: tuple[str, int], network: str
) -> None:
    run = task_documents.replica_task(_site(network=network), key)["run"]
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run((bash, "-n"), input=run, text=True, check=True)
    # One hour, a minute of draining, and ten to find machines.
    assert "timeout --kill-after=60 4260 " in run
    assert "sleep" not in run


def _several(key: tuple[str, int], **sky: Any) -> dict[str, Any]:
    machines = {"ordered": [{"infra": "aws", "accelerators": "H100:8"}], "num_nodes": 2}
    return task_documents.replica_task(_site(**{key[0]: machines}, **sky), key)


def _started(document: dict[str, Any], rank: int) -> list[str]:
    """The command line that the script executes on that machine."""
    bash = shutil.which("bash")
    assert bash is not None
    shown = 'timeout() { printf "%s\\n" "$@"; }\n' + document["run"]
    environment = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    done = subprocess.run(
        (bash, "-euc", shown), env=environment, text=True, check=True, capture_output=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("key", "label", "further", "shared"),
    [
        (
            (LEARNER, 0),
            "learner-node-1",
            "flotilla_learner.ranks",
            {"--learner.rank.nodes=2", "--learner.rank.ray_port=4713"},
        ),
        (
            (ROLLOUT, 3),
            "rollout-3-node-1",
            "flotilla_rollout.nodes",
            # Each replica has its own: on Slurm, two may share a machine.
            {"--rollout.engine.nodes=2", "--rollout.engine.ray_port=4717"},
        ),
    ],
    ids=["learner", "rollout"],
)
def test_the_first_machine_of_a_replica_runs_it_and_the_others_what_joins_it(
    key: tuple[str, int], label: str, further: str, shared: set[str]
) -> None:
    service, index = key
    document = _several(key, port=4711)
    assert document["num_nodes"] == 2
    first, second = (_started(document, rank) for rank in (0, 1))
    at = first.index("--")
    given = parse_arguments(first[first.index("flotilla_launcher.agent") + 1 :])
    assert (given.node, given.label) == (0, f"{service}-{index}")
    assert first[at + 4] == f"flotilla_{service}" and "--listen=10.0.0.7:0" in first[at:]
    assert first[first.index("--replica", at) + 1] == str(index)
    own_folder = given.run_dir
    at = second.index("--")
    given = parse_arguments(second[second.index("flotilla_launcher.agent") + 1 :])
    assert (given.node, given.label, given.key) == (1, label, key)
    assert given.run_dir != own_folder, "machines of a Slurm share a file system"
    assert second[at + 4] == further
    assert {"--replica=1", f"--peer={service}=10.0.0.7:0"} <= set(second[at:])
    assert all(shared <= set(words) for words in (first, second))


@pytest.mark.parametrize("key", _KEYS)
def test_a_replica_of_one_machine_gets_no_node_options(key: tuple[str, int]) -> None:
    document = task_documents.replica_task(_site(), key)
    assert "num_nodes" not in document
    assert "nodes" not in document["run"] and "SKYPILOT_NODE_RANK" not in document["run"]


def test_a_machine_on_a_private_network_listens_on_its_own_address() -> None:
    run = task_documents.replica_task(_site(), (ROLLOUT, 3))["run"]
    assert '--listen="$ADDRESS:0"' in run and "--replica 3" in run


def test_ports_are_opened_on_a_public_network_for_those_who_are_called() -> None:
    site = _site(network="public", port=4711)
    for key in _KEYS:
        document = task_documents.replica_task(site, key)
        called = key[0] != ROLLOUT
        opened = {LEARNER: [4711, 4712], GATEWAY: [4711]}.get(key[0])
        assert document["resources"].get("ports") == opened
        assert ("--listen=0.0.0.0:4711" in document["run"]) == called
        assert ("--listen=127.0.0.1:0" in document["run"]) == (not called)


def test_a_machine_that_idles_takes_itself_down() -> None:
    resources = task_documents.replica_task(_site(), (ROLLOUT, 3))["resources"]
    assert resources["autostop"] == {"idle_minutes": 10, "down": True, "wait_for": "jobs"}


def test_slurm_itself_ends_an_allocation_when_the_run_has_a_limit() -> None:
    slurm = {"ordered": [{"infra": "slurm/mini/gpu", "accelerators": "H100:1"}]}
    settings = config(learner=slurm)
    document = task_documents.replica_task(_site(learner=slurm), (LEARNER, 0))
    assert document["config"] == {"slurm": {"sbatch_options": {"time": "01:11:00"}}}
    # YAML 1.1 reads some of these times as numbers.
    assert yaml.safe_load(cost_estimate.dump_yaml([document])) == document
    endless = launch((LEARNER, 0), settings.model_copy(update={"max_hours": None}))
    site = task_documents.site_from_launch(endless, "abc", "h:1", "/code")
    assert "config" not in task_documents.replica_task(site, (LEARNER, 0))


def test_evaluation_is_the_learners_mode() -> None:
    wish = replace(launch((LEARNER, 0)), mode=RunMode.EVAL_ONLY)
    site = task_documents.site_from_launch(wish, "abc", "h:1", "/code")
    assert "--learner.mode=eval" in task_documents.replica_task(site, (LEARNER, 0))["run"]
    assert "--learner.mode=eval" not in task_documents.replica_task(site, (ROLLOUT, 0))["run"]


def test_labels_describe_a_machine_in_letters_that_all_clouds_take() -> None:
    labels = task_documents.replica_task(_site(labels={"team": "rl"}), (GATEWAY, 0))["resources"][
        "labels"
    ]
    assert labels["team"] == "rl"
    assert labels["flotilla-run"] == RUN_ID
    assert labels["flotilla-service"] == "env-gateway"


@pytest.mark.parametrize("key", _KEYS)
def test_what_runs_on_a_machine_and_the_machine_itself_carry_the_runs_one_name(
    key: tuple[str, int],
) -> None:
    """Trackers, checkpoints and logs use the `--run-id` of their service."""
    site = _site()
    document = task_documents.replica_task(site, key)
    assert document["run"].count(f"--run-id {site.run_id} ") == 2, "the watcher's and the service's"
    labels = document["resources"]["labels"]
    assert labels["flotilla-run"] == names.slugify_run_id(site.run_id)
    owned = names.parse_name(document["name"])
    assert owned is not None and owned.run == names.run_mark(site.owner, site.run_id)
