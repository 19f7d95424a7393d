"""The benchmark of a rank on a GPU: it runs on a CPU, too, and with few packages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_learner
from flotilla_learner.rank.block_compilation import CACHE_VARIABLE
from tests.support.repository import ROOT

_SERVICES_ALONE = ("vllm", "renderers", "mcp", "aiohttp", "structlog", "sky", "wandb", "msgspec")
_BLOCKED = f"""
import sys
for name in {_SERVICES_ALONE}:
    sys.modules[name] = None
from benchmarks.gpu_learner import main
main(["--tiny"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_are_measured_beside_those_that_are_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    gpu_learner.main(["--tiny", "--compile", "--steps", "1"])
    output = capsys.readouterr().out
    assert "| Flotilla, compiled | 128 |" in output
    assert [each["compiled"] for each in figures(output)] == [False, True, False, True]
    shares = json.loads(output.splitlines()[-1])["compiled_share"]
    assert shares.keys() == {"64", "128"} and all(share > 0 for share in shares.values())


def figures(printed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])["packs"]
    return found


def test_the_same_code_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_learner.main(["--tiny"])
    output = capsys.readouterr().out
    assert [each["pack"] for each in figures(output)] == [64, 128]
    assert all(each["tokens_per_s"] > 0 for each in figures(output))


@pytest.mark.slow
def test_it_runs_without_the_packages_of_other_services() -> None:
    done = subprocess.run(
        (sys.executable, "-c", _BLOCKED), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert len(figures(done.stdout)) == 2


def test_a_checkout_is_small_enough_to_be_carried() -> None:
    listed = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    sizes = [(ROOT / name).stat().st_size for name in listed.stdout.split("\0") if name]
    assert sum(sizes) < 64 * 2**20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_packs_of_16k_and_64k_tokens_fit_into_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_learner.main(["--steps", "1"])
    found = figures(capsys.readouterr().out)
    assert [each["pack"] for each in found] == [16_384, 65_536]
    assert found[0]["peak_gib"] < 40
