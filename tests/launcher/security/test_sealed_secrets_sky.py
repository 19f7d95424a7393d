"""A run on rented machines, on the tests' SkyPilot, with a canary for every secret there is."""

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.api.registry_server import GrpcRegistryHost
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.code_bundle import CODE_FOLDER
from flotilla_launcher.backends.sky.ports import Document
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.cli import plan as plans
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies, StartOrder
from flotilla_launcher.security.sealed_secrets import KEY_FILE, unseal_secrets
from flotilla_launcher.state import Cleanup
from flotilla_launcher.store.ledger import Ledger
from tests.support.canary import HOOK, Canaries
from tests.support.launcher import spec
from tests.support.skypilot.in_process import skypilot_here
from tests.support.skypilot.server import Server

IDENTITY = {"FLOTILLA_TOKEN", "FLOTILLA_TLS"}
# The secrets that the spec below names for the machines of each service.
GIVEN = {
    "env_gateway": {"FLEET_API_KEY"},
    "learner": {"WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"},
    "rollout": set[str](),
}
# Passed on if the launcher has them: the spec's store and model may require them.
BESIDES = {
    "env_gateway": set[str](),
    "learner": {"AWS_SESSION_TOKEN", "FLOTILLA_REMOTE_OPTIONS", "HF_TOKEN"},
    "rollout": {"HF_TOKEN"},
}


def wish() -> dict[str, Any]:
    """Every setting that names a secret, by its variable."""
    sky = {"commit": "HEAD", "advertise": "127.0.0.1"}
    accepting = dict.fromkeys(GIVEN, "tests.support.accepting_service")
    notify = {"slack": {"channel": "C1"}, "webhook_env": HOOK}
    launcher = {"backend": "sky", "sky": sky, "modules": accepting, "notify": notify}
    keys = [f"${name}" for name in sorted(GIVEN["learner"]) if name.startswith("AWS")]
    return spec(
        launcher=launcher,
        policy={"model": "owner/name", "max_model_len": 8},
        learner={
            "tracking": {"backends": ["wandb"]},
            "vendor": {"keys": keys},
            "checkpoint": {"remote": "s3://bucket/prefix"},
        },
        env_gateway={"backend": "fleet"},
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "main.py").write_text("")
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        subprocess.run(("git", "-C", str(root), *who, *words), check=True)
    return root


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Server]:
    with skypilot_here(tmp_path / "skypilot") as server:
        yield server


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Canaries:
    found = Canaries()
    for name, value in found.environ("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    return found


async def until_all_run(launcher: Launcher, sky: Server, run_id: str) -> None:
    supervisor = launcher.get_supervisor(run_id)
    assert supervisor is not None
    while len(sky.launched) < len(GIVEN):
        await supervisor.changed.next_change.wait()


async def test_skypilot_gets_names_of_secrets_and_each_task_its_own_values(
    tmp_path: Path, root: Path, sky: Server, canaries: Canaries
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    store = Ledger(runs / "launcher.sqlite")
    backend = SkyBackend(runs, root, SkyClient(), poll_s=0.02, silent_s=0.0)
    registries = GrpcRegistryHost(runs, lambda run_id, server: None)
    launcher = Launcher(runs, store, LauncherDependencies({"sky": lambda: backend}, registries))
    run_id = await launcher.start_run("request", StartOrder(json.dumps(wish())))
    await until_all_run(launcher, sky, run_id)
    identity = (runs / ".identity" / run_id / "token").read_text()
    canaries.values["the run's token"] = identity
    assert canaries.traces(json.dumps(sky.launched).encode()) == set()
    assert not [document for document in sky.launched if document.get("envs")]
    _check_given(sky.launched, canaries, runs / run_id / CODE_FOLDER / KEY_FILE)
    # The ledger, the spec and the code that the machines get; WAL included.
    assert canaries.in_files(runs) == {}
    for cluster in list(sky.state.machines):
        sky.finish(cluster)
    supervisor = launcher.get_supervisor(run_id)
    await launcher.close(0.0)
    assert canaries.in_files(runs) == {}
    assert supervisor is not None
    assert supervisor.run.cleanup is Cleanup.VERIFIED
    assert not list(runs.rglob(f"{KEY_FILE}*")), "SkyPilot's copy is useless by now"
    store.close()


def _check_given(documents: list[Document], canaries: Canaries, key_file: Path) -> None:
    """Check learner, gateway and rollout: names in the documents, and beside them values
    that are sealed."""
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    opened = [dict(document["secrets"]) for document in documents]
    for each in opened:
        unseal_secrets(each, key_file)
    assert len({document["name"] for document in documents}) == len(GIVEN)
    for document in documents:
        service = document["resources"]["labels"]["flotilla-service"].replace("-", "_")
        assert set(document["secrets"]) == IDENTITY | GIVEN[service] | BESIDES[service]
    handed = [canaries.traces(json.dumps(values).encode()) for values in opened]
    named = [found - {"the run's token"} for found in handed]
    given = [GIVEN[service] | BESIDES[service] for service in GIVEN]
    assert sorted(map(sorted, named)) == sorted(map(sorted, given))


@pytest.mark.parametrize("one_machine", [False, True])
def test_the_task_files_of_a_plan_hold_no_secret(
    tmp_path: Path, canaries: Canaries, capsys: pytest.CaptureFixture[str], one_machine: bool
) -> None:
    path, out = tmp_path / "spec.json", tmp_path / "out"
    path.write_text(json.dumps(wish()))
    assert plans.print_plan(path, tmp_path / "runs", [], out, one_machine=one_machine) == 0
    assert canaries.in_files(tmp_path) == {}
    assert plans.print_plan(path, tmp_path / "runs", [], None, one_machine=one_machine) == 0
    printed = capsys.readouterr().out
    assert canaries.traces(printed.encode()) == set()
    assert "FLEET_API_KEY" in printed
