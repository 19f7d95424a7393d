"""kill -9 of the processes of `flotilla tinker-serve` while three clients sample and train."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.tinker_campaign import MODULES, ZEROS, run_campaign


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_acknowledged_is_lost_or_done_twice(engine_folder: Path, tmp_path: Path) -> None:
    found = asyncio.run(run_campaign(engine_folder, 1.5, tmp_path / "served"))

    assert {name: found[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0), found["failures"]
    assert found["kills"].keys() == MODULES.keys()
    assert min(found["steps"]) > 0
