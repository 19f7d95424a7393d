"""Machines on which real watchers keep fake services, found by a real launcher."""

from pathlib import Path
from typing import Any

import pytest

from services.launcher.runs import Outcome, RunState
from tests.faults.sky_kills.folder import SkyFolder, opened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def _begin(folder: SkyFolder, learner: dict[str, Any], **launcher: Any) -> None:
    folder.script(bare=False)
    await folder.start(folder.wish(launcher, learner=learner))


async def test_a_run_on_machines_trains_completes_and_brings_its_logs(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await _begin(folder, {"steps": 5, "message": "a learner's words"})
        run = (await folder.gone(Outcome.COMPLETED)).run
        assert run.state is RunState.COMPLETED
        lines = await folder.logs("learner")
        assert any("a learner's words from learner-0" in line for line in lines), lines
