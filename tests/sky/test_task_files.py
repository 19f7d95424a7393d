"""SkyPilot takes the task files in deploy/sky as they are, and knows the prices that plans show."""

import os
import socket
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.backends.sky import task_documents
from flotilla_launcher.backends.sky.machine_candidates import NO_PORTS, SINGLE_NODE
from flotilla_launcher.backends.sky.price_catalog import PriceCatalog
from flotilla_launcher.backends.sky.sdk_prices import SkyPrices
from flotilla_launcher.config.sky import Machine
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, SERVICES
from tests.sky.box.layout import ROOT
from tests.sky.catalog import write_catalog
from tests.support.sky_launches import config, launch

pytestmark = [
    pytest.mark.sky,
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]

_GPU = {"accelerators": "H100:1", "disk_size": 300}
_CPU = {"cpus": "4+", "memory": "16+"}
# By infra: SkyPilot's name of the cloud, and its values of region and zone.
_TAKEN = {
    "lambda": ("Lambda", None, None),
    "runpod": ("RunPod", None, None),
    "vast": ("Vast", None, None),
    "aws": ("AWS", None, None),
    "gcp": ("GCP", None, None),
    "azure": ("Azure", None, None),
    "oci": ("OCI", None, None),
    "nebius": ("Nebius", None, None),
    "kubernetes": ("Kubernetes", None, None),
    "slurm/mini/cpu": ("Slurm", "mini", "cpu"),
    "ssh/pool": ("SSH", "ssh-pool", None),
}
# SkyPilot looks for these clusters first; here it finds none, in its file or without the package
# that `make sky-clouds` adds.
_LOOKED_UP: dict[str, tuple[type[Exception], str]] = {
    "slurm/mini/cpu": (ValueError, "Cluster mini not found in Slurm config"),
    "ssh/pool": (ValueError, "SSH Node Pool 'pool' is not set up")
    if find_spec("kubernetes")
    else (ImportError, "Failed to import dependencies for Kubernetes"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a catalog, so that SkyPilot needs no internet."""
    write_catalog(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_whole_run_on_one_machine_is_launched_by_its_key_and_choices(home: Path) -> None:
    dags: Any = import_module("sky.utils.dag_utils")
    path = ROOT / "deploy/sky/openenv-fleet-grpo.yaml"
    choices = [("MODALITY", "tool_use"), ("MAX_TASKS", "100")]
    dag = dags.load_dag_from_yaml(str(path), choices, [("FLEET_API_KEY", "canary-key")])
    (task,) = dag.tasks
    assert task.envs["MODALITY"] == "tool_use" and task.envs["MAX_TASKS"] == "100"
    # Of any cloud, which call the same GPU by two names.
    assert {str(r.accelerators) for r in task.resources} == {"{'H100': 1}", "{'H100-SXM': 1}"}
    assert {r.cloud for r in task.resources} == {None}
    assert all(resources.autostop_config.down for resources in task.resources)


@pytest.mark.parametrize("option", ["--env", "--secret"])
def test_a_key_that_may_be_left_out_reaches_the_run_by_either_option(
    home: Path, option: str
) -> None:
    dags: Any = import_module("sky.utils.dag_utils")
    path = ROOT / "deploy/sky/openenv-fleet-grpo.yaml"
    needed, given = [("FLEET_API_KEY", "canary-key")], [("WANDB_API_KEY", "k"), ("HF_TOKEN", "h")]
    by_env, by_secret = (given, needed) if option == "--env" else ([], needed + given)
    (task,) = dags.load_dag_from_yaml(str(path), by_env, by_secret).tasks
    found = {
        name: getattr(value, "get_secret_value", lambda value=value: value)()
        for name, value in task.envs_and_secrets.items()
    }
    assert dict(needed + given).items() <= found.items()
    assert found["AWS_ACCESS_KEY_ID"] == ""
    assert not task.managed_secret_refs, "SkyPilot refuses the launch if one is left"


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-32b", "tiny-slurm"])
def test_a_replicas_file_is_one_task(home: Path, name: str, service: str) -> None:
    dags: Any = import_module("sky.utils.dag_utils")
    dag = dags.load_dag_from_yaml(str(ROOT / f"deploy/sky/{name}-{service}.yaml"))
    assert [task.num_nodes for task in dag.tasks] == [1]


@pytest.mark.parametrize("infra", _TAKEN)
def test_a_replica_is_a_valid_task_of_every_cloud(home: Path, infra: str) -> None:
    # Only a cluster could answer which ports Kubernetes can open.
    closed = infra.partition("/")[0] in {*NO_PORTS, "kubernetes", "ssh"}
    network = "private" if closed else "public"
    for service, wish in ((LEARNER, _GPU), (GATEWAY, _CPU), (ROLLOUT, _GPU)):
        machines = {service: {"ordered": [{"infra": infra, **wish}]}}
        replica = launch((service, 0), config(network=network, **machines))
        site = task_documents.site_from_launch(replica, "abc", "10.0.0.5:4000", str(home))
        document = task_documents.replica_task(site, (service, 0))
        task: Any = import_module("sky").Task.from_yaml_config(document)
        (taken,) = task.resources
        assert (str(taken.cloud), taken.region, taken.zone) == _TAKEN[infra]
        if infra in _LOOKED_UP:
            refusal, words = _LOOKED_UP[infra]
            with pytest.raises(refusal, match=words):
                task.validate()
        else:
            task.validate()


def test_prices_of_skypilot_and_of_its_catalog_agree(home: Path) -> None:
    catalog = PriceCatalog(home / ".sky")
    for machine in (
        Machine(infra="lambda", accelerators="H100:1"),
        Machine(infra="lambda/us-east-1", accelerators="H100:8"),
        Machine(infra="runpod", accelerators="H100-SXM:1", use_spot=True),
    ):
        # With nothing to fall back on, the price is SkyPilot's own.
        price = SkyPrices(PriceCatalog(home / "empty")).machine_price(machine)
        assert price is not None and price == pytest.approx(catalog.machine_price(machine))


def test_a_plan_does_not_wait_for_a_catalog_that_is_not_sent(tmp_path: Path) -> None:
    words = ("-m", "flotilla_launcher.cli.app", "plan", "deploy/runs/qwen3-8b.toml")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        proxy = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            (sys.executable, *words),
            cwd=ROOT,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "HTTPS_PROXY": proxy},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        silent.setblocking(False)
        requests, _ = silent.accept()
        with requests, pytest.raises(BlockingIOError):
            silent.accept()
    assert "in total: price unknown" in done.stdout
    assert "learner x 1: lambda/us-south-3 H100:2" in done.stdout


def test_clouds_without_multi_node_are_those_that_skypilot_names() -> None:
    feature = import_module("sky.clouds").CloudImplementationFeatures.MULTI_NODE
    known: dict[str, Any] = import_module("sky.utils.registry").CLOUD_REGISTRY
    refusing = {
        name
        for name, cloud in known.items()
        if feature in getattr(cloud, "_CLOUD_UNSUPPORTED_FEATURES", {})
    }
    assert refusing == SINGLE_NODE
