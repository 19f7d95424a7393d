"""Ids of new runs."""

import os
from pathlib import Path

from tests.support.launcher import serving, spec


async def test_b52_a_new_run_never_takes_a_folder_or_link_that_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    async with serving(runs) as served:
        first = await served.start(spec())
        await served.ended(first)
        # Independent of the clock, the next ids are all taken by links to another place.
        base = first.rpartition("-")[0]
        for second in range(60):
            (runs / f"{base}-{int(first[-6:]) + second + 1:06d}").symlink_to(outside)
        run_id = await served.start(spec())
        await served.ended(run_id)
    assert not (runs / run_id).is_symlink()
    assert os.listdir(outside) == []
