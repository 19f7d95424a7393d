"""Comparisons after an update, on a CPU with fewer vector instructions, which rounds differently.

`make test-full` runs all quick tests of ranks in this way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FEWER = {"AVX512": "avx2", "AVX2": "default"}
HERE = Path(__file__).parent
COMPARISONS = [
    "test_prompt_sharing.py::test_so_are_those_of_windows_experts_and_heads_of_their_own[heads]",
    "test_routing_replay.py::test_a_prompt_is_shared_where_its_experts_are_the_same",
    "test_routing_replay.py::test_packs_and_recomputed_blocks_replay_the_same[selective-1]",
]


@pytest.mark.timeout(240)
def test_comparisons_of_steps_hold_with_other_rounding(tmp_path: Path) -> None:
    fewer = FEWER.get(torch.backends.cpu.get_cpu_capability())
    if fewer is None:
        pytest.skip("this CPU has none to leave out")
    session = ("--basetemp", str(tmp_path / "session"), "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *session, *(str(HERE / each) for each in COMPARISONS)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": fewer},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
