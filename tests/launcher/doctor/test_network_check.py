"""Nodes, environments and clouds that answer wrongly or not at all."""

import json
import os
import sys
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.tasks import make_task
from services.common.process.arguments import TOKEN_VARIABLE
from services.common.rpc.tls import TLS_VARIABLE
from services.launcher.doctor.adapters.clouds_probe import judge_clouds
from services.launcher.doctor.findings import Status
from services.launcher.doctor.probe_process import run_probe_module
from services.launcher.security.certificates import mint_identity
from tests.support.doctor import (
    TOKEN,
    check,
    double,
    echo_of,
    probed,
    service_forge,
    skypilot,
    spec,
    subject,
)
from tests.support.free_ports import free_address
from tests.support.repository import ROOT

SKY_PYTHON = ROOT / ".venv-sky/bin/python"


async def test_an_echo_of_another_run_or_with_another_token_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    theirs, ours = (
        mint_identity("theirs").tls_for("learner"),
        mint_identity("ours").tls_for("rollout"),
    )
    about = subject(spec(policy, tasks), tmp_path, **{TOKEN_VARIABLE: TOKEN})
    with echo_of(
        "127.0.0.1:0", service_forge(), **{TOKEN_VARIABLE: TOKEN, TLS_VARIABLE: theirs.to_text()}
    ) as at:
        result = await probed("echo", replace(about, nodes=(at,), tls=ours))
        check(result, Status.FAIL, at, "with --tls-dir of the same run")
    with echo_of(
        "127.0.0.1:0", service_forge(), **{TOKEN_VARIABLE: "another-token-that-is-long-enough"}
    ) as at:
        result = await probed("echo", replace(about, nodes=(at,)))
        check(result, Status.FAIL, at, "UNAUTHENTICATED", "with the same FLOTILLA_TOKEN")


async def test_a_node_where_nothing_listens_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    address = free_address()
    about = subject(spec(policy, tasks), tmp_path, **{TOKEN_VARIABLE: TOKEN})
    result = await probed("echo", replace(about, nodes=(address,)))
    check(result, Status.FAIL, f"{address} does not answer", "firewalls")


@pytest.mark.parametrize("backend", ["local", "sky"])
async def test_nodes_hear_each_other_in_clear_here_and_under_tls_elsewhere(
    policy: Path, tasks: Path, tmp_path: Path, backend: str
) -> None:
    about = subject(spec(policy, tasks, f"launcher.backend={backend}"), tmp_path)
    how = "in clear" if backend == "local" else "under TLS"
    check(await probed("echo", about), Status.OK, f"gave 1048576 bytes back {how}")


async def test_an_environment_that_cannot_be_opened_is_named_and_the_others_show_their_tools(
    policy: Path, tmp_path: Path
) -> None:
    known, unknown = make_task("booking", "train", 0), make_task("tracker", "train", 0)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([known, {**unknown, "env_id": "teleporter"}]))
    result = await probed("episodes", subject(spec(policy, path), tmp_path))
    check(result, Status.FAIL, "teleporter cannot be opened", "or correct env_id of its tasks")
    check(result, Status.FAIL, "booking: 4 tools (book_room,")
    assert not children()


def children() -> list[str]:
    """Gateways that this process has started and not ended."""
    found: list[str] = []
    for child in psutil.Process().children(recursive=True):
        # A gateway that is just ending has none.
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return [command for command in found if "services.env_gateway" in command]


async def test_a_backend_that_does_not_start_is_quoted_with_its_error(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    command = json.dumps([sys.executable, "-c", "raise SystemExit('no licence')"])
    short = ("env_gateway.open_timeout_s=1.0", "env_gateway.close_timeout_s=1.0")
    content = spec(policy, tasks, "env_gateway.backend=mcp", *short)
    content["env_gateway"]["servers"] = [{"command": json.loads(command), "instances": True}]
    result = await probed("episodes", subject(content, tmp_path))
    check(result, Status.FAIL, "booking cannot be opened", "code 1 and wrote: no licence")


async def test_a_missing_skypilot_is_reported_with_what_installs_it(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "launcher.backend=sky")
    result = await probed("clouds", subject(content, tmp_path))
    check(result, Status.FAIL, "SkyPilot is not installed here", "make sky")


async def test_an_api_server_that_does_not_answer_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "launcher.backend=sky")
    with double(lambda *_: (401, {})) as url:
        environ = skypilot(tmp_path, url)
        result = await probed("clouds", subject(content, tmp_path, **environ))
    check(result, Status.FAIL, f"does not answer at {url}: 401", "sky api start")
    away = await probed("clouds", subject(content, tmp_path, **environ))
    check(away, Status.FAIL, f"does not answer at {url}: ", "Connection refused", "sky api login")


@pytest.mark.skipif(not SKY_PYTHON.exists(), reason="`make sky` makes SkyPilot's environment")
@pytest.mark.parametrize("status", [200, pytest.param(503, marks=pytest.mark.slow)])
async def test_the_api_server_that_skypilots_configuration_names_is_the_one_that_is_queried(
    tmp_path: Path, status: int
) -> None:
    requests: list[tuple[str, str]] = []

    def handle(path: str, headers: Mapping[str, str], _: Any) -> tuple[int, Any]:
        requests.append((path, headers.get("authorization", "")))
        return status, {}

    with double(handle) as url:
        named = url.replace("//", "//ada:a-password@")
        (tmp_path / ".sky").mkdir()
        (tmp_path / ".sky/config.yaml").write_text(f"api_server:\n  endpoint: {named}\n")
        environ = {name: value for name, value in os.environ.items() if "SKYPILOT" not in name}
        environ["HOME"] = str(tmp_path)
        # SkyPilot's client must not start a server where this double does not answer.
        environ["SKYPILOT_DISABLE_LOCAL_API_SERVER"] = "1"
        environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
        (message,) = await run_probe_module(
            str(SKY_PYTHON),
            "services.launcher.doctor.adapters.clouds_probe",
            {"wanted": {}},
            environ,
        )
    assert requests[0] == ("/api/health", f"Basic {b64encode(b'ada:a-password').decode()}")
    # The double is a healthy server that knows no cloud; the findings are SkyPilot's own.
    wrong = "sky check failed" if status == 200 else f"at {url.replace('//', '//ada:<redacted>@')}:"
    assert message.status is Status.FAIL and wrong in message.detail, message.detail
    assert "a-password" not in message.detail


def test_clouds_that_are_not_enabled_fail_where_no_candidate_is_left() -> None:
    wanted: dict[str, list[str | None]] = {
        "learner": ["lambda/us-east-1"],
        "rollout": ["lambda", "slurm/box"],
    }
    findings = judge_clouds(wanted, {"slurm"})
    assert [finding.status for finding in findings] == [Status.FAIL, Status.WARN]
    assert findings[0].detail == "learner: not enabled: lambda; see `sky check lambda`"
    assert judge_clouds(wanted, set())[0].detail.startswith("no cloud is enabled; give SkyPilot")
    assert judge_clouds({"learner": [None]}, {"aws"})[0].status is Status.OK
