"""Clouds that are not enabled, and API servers of SkyPilot that do not answer."""

import os
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.doctor.adapters.clouds_probe import judge_clouds
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.probe_process import run_probe_module
from tests.support.doctor import check, double, probed, skypilot, spec, subject
from tests.support.repository import ROOT

SKY_PYTHON = ROOT / ".venv-sky/bin/python"


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
            "flotilla_launcher.doctor.adapters.clouds_probe",
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
