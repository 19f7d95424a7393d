"""Keys that are refused, missing or another user's, at doubles that speak real HTTP."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.free_ports import free_address, free_port
from flotilla_launcher.doctor.findings import Status
from tests.support.doctor import check, double, emulator, probed, spec, subject
from tests.support.remote_checkpoints import BUCKET, s3_server

KEY = "a-key-of-fleet-for-tests"


@pytest.fixture(scope="module")
def fleet_url() -> Generator[str]:
    with emulator(KEY, "--instance-limit", "3") as url:
        yield url


def at_fleet(policy: Path, tasks: Path, url: str, *overrides: str) -> dict[str, Any]:
    backend = ("env_gateway.backend=fleet", f"env_gateway.backends.fleet.url={url}")
    return spec(policy, tasks, *backend, *overrides)


async def test_fleets_key_is_good_and_its_instances_are_few(
    policy: Path, tasks: Path, tmp_path: Path, fleet_url: str
) -> None:
    about = subject(at_fleet(policy, tasks, fleet_url), tmp_path, FLEET_API_KEY=KEY)
    check(
        await probed("fleet", about),
        Status.WARN,
        "4 attempts at once, but Fleet allows 3 instances",
        "lower rollout.max_attempts",
        "knows the key",
    )


async def test_a_key_that_fleet_refuses_is_named_by_its_variable(
    policy: Path, tasks: Path, tmp_path: Path, fleet_url: str
) -> None:
    content = at_fleet(
        policy, tasks, fleet_url, "env_gateway.backends.fleet.api_key_env=MY_FLEET_KEY"
    )
    result = await probed("fleet", subject(content, tmp_path, MY_FLEET_KEY="of-another-user"))
    check(result, Status.FAIL, "refuses the key in MY_FLEET_KEY (401)", "export MY_FLEET_KEY again")


async def test_a_key_that_is_not_set_is_named(
    policy: Path, tasks: Path, tmp_path: Path, fleet_url: str
) -> None:
    result = await probed("fleet", subject(at_fleet(policy, tasks, fleet_url), tmp_path))
    check(result, Status.FAIL, "FLEET_API_KEY is not set", "export FLEET_API_KEY")


async def test_a_control_plane_that_is_not_there_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    url = f"http://{free_address()}"
    result = await probed(
        "fleet", subject(at_fleet(policy, tasks, url), tmp_path, FLEET_API_KEY=KEY)
    )
    check(result, Status.FAIL, f"{url} cannot be reached", "correct the backend's url")


def wandb(viewer: Mapping[str, Any] | None, status: int = 200) -> Any:
    return lambda path, headers, body: (status, {"data": {"viewer": viewer}})


WANDB = ('learner.tracking.backends=["wandb"]', "learner.tracking.mode=online")


async def test_a_key_that_wandb_does_not_know_is_refused(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with double(wandb(None)) as url:
        environ = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "nobodys-key-at-all"}
        result = await probed("wandb", subject(spec(policy, tasks, *WANDB), tmp_path, **environ))
    check(result, Status.FAIL, f"{url} does not know the key", "export WANDB_API_KEY again")


async def test_an_entity_that_the_key_is_not_of_is_named_with_those_that_it_is_of(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    viewer = {"username": "ada", "teams": {"edges": [{"node": {"name": "engines"}}]}}
    content = spec(policy, tasks, *WANDB, "learner.tracking.entity=looms")
    with double(wandb(viewer)) as url:
        environ = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "adas-own-key-0"}
        result = await probed("wandb", subject(content, tmp_path, **environ))
        well = await probed("wandb", subject(spec(policy, tasks, *WANDB), tmp_path, **environ))
    check(result, Status.FAIL, "ada is not in learner.tracking.entity looms, but in engines")
    check(well, Status.OK, "wandb knows the key, of ada")


async def test_no_key_of_wandb_is_a_warning_where_the_run_may_go_offline(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    auto = spec(policy, tasks, WANDB[0])
    check(await probed("wandb", subject(auto, tmp_path)), Status.WARN, "the run would go offline")


SLACK = ("launcher.notify.slack.channel=runs",)


def slack(body: dict[str, Any], scopes: str) -> Any:
    return lambda path, headers, _: (
        200,
        {**body, "path": path, "headers": {"x-oauth-scopes": scopes}},
    )


@pytest.mark.parametrize(
    ("body", "scopes", "words"),
    [
        ({"ok": False, "error": "invalid_auth"}, "", ("invalid_auth", "make a new bot token")),
        ({"ok": True}, "channels:read", ("lacks the scope chat:write", "add the scope")),
    ],
)
async def test_a_token_that_slack_refuses_or_that_may_not_post_fails(
    policy: Path, tasks: Path, tmp_path: Path, body: Any, scopes: str, words: tuple[str, ...]
) -> None:
    with double(slack(body, scopes)) as url:
        content = spec(policy, tasks, *SLACK, f"launcher.notify.slack.api_url={url}")
        about = subject(content, tmp_path, SLACK_BOT_TOKEN="xoxb-for-tests")
        check(await probed("slack", about), Status.FAIL, "SLACK_BOT_TOKEN", *words)


async def test_a_token_that_may_post_is_well(policy: Path, tasks: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def handle(path: str, headers: Mapping[str, str], _: Any) -> tuple[int, Any]:
        seen.append((path, headers["authorization"]))
        return 200, {"ok": True, "user": "flotilla", "team": "Engines"}

    with double(handle) as url:
        content = spec(policy, tasks, *SLACK, f"launcher.notify.slack.api_url={url}")
        about = subject(content, tmp_path, SLACK_BOT_TOKEN="xoxb-for-tests")
        check(await probed("slack", about), Status.OK, "flotilla in Engines")
    assert seen == [("/auth.test", "Bearer xoxb-for-tests")]


async def test_a_key_that_a_vendor_repeats_is_hidden(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    secret = "a-canary-that-must-not-leak"
    with double(lambda *_: (500, {"you sent": secret})) as url:
        about = subject(at_fleet(policy, tasks, url), tmp_path, FLEET_API_KEY=secret)
        result = await probed("fleet", about)
    check(result, Status.FAIL, "answered 500", "[FLEET_API_KEY]")
    assert secret not in result.detail


async def test_a_webhook_without_a_listener_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "launcher.notify.webhook_env=MY_HOOK")
    port = free_port()
    about = subject(content, tmp_path, MY_HOOK=f"http://127.0.0.1:{port}/hook")
    check(await probed("webhook", about), Status.FAIL, f"127.0.0.1:{port} of MY_HOOK", "correct")


async def test_secrets_that_are_not_set_are_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    names = 'launcher.sky.secrets=["HERE_IT_IS", "NOT_THERE"]'
    content = spec(policy, tasks, "launcher.backend=sky", names)
    result = await probed("secrets", subject(content, tmp_path, HERE_IT_IS="yes"))
    check(result, Status.FAIL, "not set, or blank: NOT_THERE", "export NOT_THERE")


def upload(policy: Path, tasks: Path, endpoint: str, bucket: str) -> dict[str, Any]:
    content = spec(policy, tasks, f"learner.checkpoint.remote=s3://{bucket}/runs")
    content["learner"]["checkpoint"]["remote_options"] = {"endpoint_url": endpoint}
    return content


AWS = {
    "AWS_ACCESS_KEY_ID": "an-id-for-tests",
    "AWS_SECRET_ACCESS_KEY": "a-secret-for-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
}


async def test_an_object_is_written_read_and_removed_where_checkpoints_go(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as endpoint:
        well = subject(upload(policy, tasks, endpoint, BUCKET), tmp_path)
        check(await probed("store", well), Status.OK, "wrote, read back and removed")
        wrong = subject(upload(policy, tasks, endpoint, "no-such-bucket"), tmp_path)
        check(
            await probed("store", wrong),
            Status.FAIL,
            "cannot write to s3://no-such-bucket/runs",
            "make the bucket",
        )
        import fsspec

        files: Any = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
        assert files.find(BUCKET) == []


async def test_a_store_that_does_not_answer_is_named_by_its_option(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = upload(policy, tasks, f"http://{free_address()}", BUCKET)
    result = await probed("store", subject(content, tmp_path, **AWS))
    check(result, Status.FAIL, "cannot write to s3://", "see whether endpoint_url")
    assert AWS["AWS_SECRET_ACCESS_KEY"] not in result.detail
