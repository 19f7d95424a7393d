"""The secrets that a machine gets: those it requires, and those it uses if they are set."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_common.process.child_environment import child_environment
from flotilla_launcher.backends.ports import BackendError
from flotilla_launcher.backends.sky import cost_estimate, task_documents
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.security import service_variables
from flotilla_launcher.security.sealed_secrets import KEY_FILE, unseal_secrets
from flotilla_launcher.security.service_variables import (
    LAUNCHERS_OWN,
    inherited_variables,
    variables_of_any_service,
)
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, SERVICES, ReplicaKey
from tests.support.run_specs import bare_spec
from tests.support.sky_launches import config, launch
from tests.support.skypilot.server import Server

STORE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
OPTIONS, HUB = "FLOTILLA_REMOTE_OPTIONS", "HF_TOKEN"
WISH: dict[str, Any] = {
    "policy": {"model": "Qwen/Qwen3-8B"},
    "learner": {"checkpoint": {"remote": "s3://bucket/prefix"}},
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in service_variables.SECRET_OWNERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("backend", ["fleet", "fleet_openenv"])
def test_both_ways_to_fleet_need_its_key_unless_they_start_an_emulator_or_name_another(
    backend: str,
) -> None:
    def named(**options: Any) -> tuple[str, ...]:
        section = {"backend": "mcp", "environments": {"booking": {"backend": backend}}}
        spec = {"env_gateway": {**section, "backends": {backend: options}}}
        found = service_variables.required_secrets(bare_spec(spec, config()), GATEWAY)
        return tuple(name for name in found if name not in service_variables.IDENTITY_VARIABLES)

    assert named() == ("FLEET_API_KEY",)
    assert named(api_key_env="MINE") == ("MINE",)
    assert named(command=["python"]) == ()


def test_the_gateway_gets_the_key_of_each_server_that_somebody_else_runs() -> None:
    servers = [
        {"name": "one", "url": "http://one.example", "api_key_env": "OFFICE_ONE"},
        {"name": "two", "url": "http://two.example", "api_key_env": "OFFICE_TWO"},
        {"name": "ours", "command": ["serve"], "api_key_env": "OFFICE_OURS"},
    ]
    spec = {"env_gateway": {"backend": "mcp", "servers": servers}}
    assert inherited_variables(bare_spec(spec, config()), GATEWAY) == ("OFFICE_ONE", "OFFICE_TWO")
    assert inherited_variables(bare_spec(spec, config()), LEARNER) == ()


def test_the_key_of_a_teacher_is_the_learners_alone() -> None:
    teacher = {"url": "http://10.0.0.7:8000/v1", "api_key": "$TEACHER_API_KEY"}
    spec = {**WISH, "learner": {**WISH["learner"], "teacher": teacher}}
    found = {name: inherited_variables(bare_spec(spec, config()), name) for name in SERVICES}
    assert [name for name, own in found.items() if "TEACHER_API_KEY" in own] == [LEARNER]


def test_a_replay_needs_no_secret_of_the_environments_that_it_replaces() -> None:
    servers = [{"name": "a", "url": "http://a", "headers": {"x-api-key": "$A_KEY"}}]
    section = {"servers": servers, "environments": {"booking": {"backend": "fleet"}}}

    def named(**more: Any) -> tuple[str, ...]:
        spec = {"env_gateway": {**section, **more}}
        return service_variables.required_secrets(bare_spec(spec, config()), GATEWAY)

    assert {"A_KEY", "FLEET_API_KEY"} <= {*named(backend="mcp")}
    replay = {"replay": {"run": "runs/one"}}
    assert named(backend="replay", backends=replay) == service_variables.IDENTITY_VARIABLES


def test_a_store_and_the_hub_have_their_keys_where_they_are_used() -> None:
    assert service_variables.optional_secrets(bare_spec(WISH), LEARNER) == (*STORE, OPTIONS, HUB)
    assert service_variables.optional_secrets(bare_spec(WISH), ROLLOUT) == (HUB,)
    assert service_variables.optional_secrets(bare_spec(WISH), GATEWAY) == ()
    assert (
        service_variables.optional_secrets(
            bare_spec({"policy": {"model": "/models/qwen"}}), LEARNER
        )
        == ()
    )


def test_trackers_have_their_variables_where_they_are_listed() -> None:
    spec = {"learner": {"tracking": {"backends": ["jsonl", "mlflow", "trackio"]}}}
    assert (
        service_variables.optional_secrets(bare_spec(spec), LEARNER)
        == service_variables.MLFLOW_SECRETS
    )
    found = inherited_variables(bare_spec(spec, config()), LEARNER)
    assert {"MLFLOW_*", "TRACKIO_DIR"} <= set(found)
    assert not set(found) & {"WANDB_*", "WANDB_API_KEY"}
    assert inherited_variables(bare_spec(spec, config()), ROLLOUT) == ()


@pytest.mark.parametrize(
    ("model", "at_hub"),
    [
        ("Qwen/Qwen3-8B", True),
        ("gpt2", True),
        ("build/tiny-0", False),
        ("./models", False),
        ("~/models", False),
        ("models/of/mine", False),
        ("", False),
    ],
)
def test_a_model_that_is_a_path_or_is_made_here_is_not_the_hubs(model: str, at_hub: bool) -> None:
    spec = {"policy": {"model": model}, "prepare": [{"creates": "build/tiny-0"}]}
    assert (service_variables.optional_secrets(bare_spec(spec), ROLLOUT) == (HUB,)) == at_hub


def test_local_runs_go_by_the_same_table() -> None:
    for service in SERVICES:
        found = inherited_variables(bare_spec(WISH, config()), service)
        assert set(found) >= set(service_variables.optional_secrets(bare_spec(WISH), service))
        assert not set(found) & {*service_variables.IDENTITY_VARIABLES, *LAUNCHERS_OWN}


def test_a_service_inherits_what_the_spec_names_and_what_the_run_makes_use_of() -> None:
    spec = {
        "learner": {"tracking": {"backends": ["jsonl", "wandb"]}},
        "env_gateway": {"servers": [{"command": ["x"], "env": {"A": "$MINE", "B": "b"}}]},
    }
    named = bare_spec(spec, config())
    assert inherited_variables(named, GATEWAY) == ("MINE",)
    assert inherited_variables(named, LEARNER) == ("WANDB_*", "WANDB_API_KEY")
    assert inherited_variables(named, ROLLOUT) == ()
    assert variables_of_any_service(named) == (HUB, "MINE", "WANDB_*", "WANDB_API_KEY")
    requests = inherited_variables(bare_spec(spec, config(secrets=["EXTRA"])), ROLLOUT)
    assert requests == ("EXTRA",)


def test_a_learner_that_uploads_finds_its_store_of_whatever_vendor() -> None:
    environ = {
        "AWS_PROFILE": "mine",
        "AZURE_STORAGE_ACCOUNT_KEY": "canary-azure-1",
        "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
        "FLEET_API_KEY": "canary-fleet-2",
    }
    named = inherited_variables(bare_spec(WISH, config()), LEARNER)
    assert child_environment(*named, environ=environ).keys() == environ.keys() - {"FLEET_API_KEY"}
    none = inherited_variables(bare_spec({"policy": {"model": "./here"}}), LEARNER)
    assert child_environment(*none, environ=environ) == {}


async def given(
    backend: SkyBackend, sky: Server, key: ReplicaKey, **changes: Any
) -> dict[str, str]:
    """The opened secrets of a replica's machine."""
    unit = await backend.start_replica(launch(key, config(commit="HEAD"), {**WISH, **changes}))
    values = dict(sky.launched[-1]["secrets"])
    unseal_secrets(values, Path(sky.launched[-1]["workdir"]) / KEY_FILE)
    await backend.kill_replica(unit)
    return {
        name: values[name] for name in values if name not in service_variables.IDENTITY_VARIABLES
    }


async def test_what_is_set_here_is_handed_over_and_what_is_not_refuses_nothing(
    backend: SkyBackend, sky: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await given(backend, sky, (LEARNER, 0)) == {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")
    monkeypatch.setenv(HUB, "a-token")
    handed = {"AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-secret", HUB: "a-token"}
    assert await given(backend, sky, (LEARNER, 0)) == handed
    assert await given(backend, sky, (ROLLOUT, 0)) == {HUB: "a-token"}
    assert await given(backend, sky, (GATEWAY, 0)) == {}


async def test_what_a_service_cannot_do_without_still_refuses_the_start(
    backend: SkyBackend,
) -> None:
    wish = launch((GATEWAY, 0), config(commit="HEAD"), {"env_gateway": {"backend": "fleet"}})
    with pytest.raises(BackendError, match="env_gateway needs FLEET_API_KEY on its machine"):
        await backend.start_replica(wish)


def test_a_plan_is_the_same_whatever_is_set_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = task_documents.site_from_launch(launch((LEARNER, 0), spec=WISH), "abc", "h:1", "/code")
    before = cost_estimate.dump_yaml([task_documents.replica_task(site, (LEARNER, 0))])
    for name in service_variables.SECRET_OWNERS:
        monkeypatch.setenv(name, "set")
    assert cost_estimate.dump_yaml([task_documents.replica_task(site, (LEARNER, 0))]) == before
    assert "AWS" not in before and HUB not in before


def test_what_is_submitted_has_a_value_for_each_name_and_a_name_for_each_value() -> None:
    document = {"name": "a", "secrets": {"FLOTILLA_TOKEN": None, "KEY": None}}
    filled = task_documents.fill_secrets(document, {"FLOTILLA_TOKEN": "t", "KEY": "k", HUB: "h"})
    assert filled == {"name": "a", "secrets": {"FLOTILLA_TOKEN": "t", "KEY": "k", HUB: "h"}}
    assert document["secrets"] == {"FLOTILLA_TOKEN": None, "KEY": None}


def test_both_sides_of_a_tinker_service_need_its_key_and_know_where_it_is() -> None:
    spec = bare_spec({"learner": {"engine": "tinker"}}, config())
    for service in (LEARNER, ROLLOUT):
        assert "TINKER_API_KEY" in service_variables.required_secrets(spec, service)
        where = service_variables.optional_secrets(spec, service)
        assert where == ("TINKER_BASE_URL", "TINKER_PROJECT_ID")
        assert set(inherited_variables(spec, service)) == {"TINKER_*", "TINKER_API_KEY", *where}
    assert inherited_variables(spec, GATEWAY) == ()
    for service in (LEARNER, ROLLOUT):
        assert inherited_variables(bare_spec({}, config()), service) == ()
