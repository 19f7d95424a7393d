"""A server that refuses a secret repeats it; the doctor and a store do not pass that on."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.config import canonical_json
from tests.support.canary import HOOK, REMOTE_OPTIONS, Canaries
from tests.support.doctor import double, spec
from tests.support.repository import ROOT


class Repeater:
    """Refuses every request, and repeats it in its answer."""

    def __init__(self) -> None:
        self.received = ""

    def __call__(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        received = f"{path} {json.dumps(dict(headers))}"
        self.received += received
        return 403, {"ok": False, "error": f"no user is known by {received}", "message": received}


def unlike(folder: Path, url: str) -> str:
    """A run that queries every service, at the repeater's address."""
    content = spec(folder / "policy", folder / "tasks.json", "env_gateway.backend=fleet")
    content["policy"]["model"] = "stranger/private"
    content["env_gateway"]["backends"] = {"fleet": {"url": url}}
    options = {"endpoint_url": url}
    content["learner"]["checkpoint"] = {"remote": "s3://bucket/runs", "remote_options": options}
    content["learner"]["tracking"] = {"backends": ["wandb"], "mode": "online"}
    slack = {"channel": "C1", "api_url": f"{url}/api"}
    content["launcher"] = {"notify": {"slack": slack, "webhook_env": HOOK}}
    task = {"key": "t", "prompt": "p", "env_id": "booking", "task_modality": "tool_use"}
    (folder / "tasks.json").write_text(json.dumps([task]))
    return canonical_json(content)


def surroundings(canaries: Canaries, url: str) -> dict[str, str]:
    given = canaries.environ(url)
    # s3fs knows an option of this name.
    given[REMOTE_OPTIONS] = json.dumps({"token": canaries.values[REMOTE_OPTIONS]})
    return {**given, "WANDB_BASE_URL": url, "HF_ENDPOINT": url, "AWS_REGION": "nowhere"}


def doctor(path: Path, environ: Mapping[str, str], *arguments: str) -> list[dict[str, str]]:
    words = ("-m", "flotilla_launcher.cli.app", "doctor", str(path), "--json", *arguments)
    for name in ("versions", "memory", "disk"):
        words += ("--skip", name)
    done = subprocess.run(
        (sys.executable, *words), capture_output=True, cwd=ROOT, env=environ, check=False
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_doctor_reports_refused_keys_without_them(tmp_path: Path) -> None:
    canaries, repeater = Canaries(), Repeater()
    with double(repeater) as url:
        environ = {**os.environ, **surroundings(canaries, url), "NETRC": os.devnull}
        path = tmp_path / "spec.json"
        path.write_text(unlike(tmp_path, url))
        results = doctor(path, environ)
    by_name = {each["probe"]: each for each in results}
    failed = {name for name, each in by_name.items() if each["status"] == "fail"}
    assert failed >= {"fleet", "wandb", "slack", "store", "episodes"}, results
    assert canaries.traces(repeater.received.encode()) >= {"FLEET_API_KEY", "SLACK_BOT_TOKEN"}
    assert canaries.traces(json.dumps(results).encode()) == set()
    assert canaries.in_files(tmp_path) == {}


def test_a_store_that_refuses_is_reported_without_its_keys(tmp_path: Path) -> None:
    canaries, repeater = Canaries(), Repeater()
    with double(repeater) as url:
        path = tmp_path / "spec.json"
        path.write_text(unlike(tmp_path, url))
        done = subprocess.run(
            (
                *(
                    sys.executable,
                    "-m",
                    "flotilla_learner.checkpoints.restore_command",
                    "s3://bucket/runs/run-1",
                ),
                *("--config", str(path), "--runs", str(tmp_path)),
            ),
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, **surroundings(canaries, url)},
            check=False,
        )
    assert done.returncode in (2, 3)
    assert "AWS_ACCESS_KEY_ID" in canaries.traces(repeater.received.encode())
    output = done.stdout + done.stderr
    assert b"s3://bucket/runs" in output
    assert canaries.traces(output) == set()
