"""GroupService against a real client over a socket."""

import asyncio
import json
from pathlib import Path

from tests.learner.support import FakeWorker, learner, make_config


async def test_a_run_trains_every_step_on_what_its_worker_submits(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=4, max_staleness=1)
    async with (
        learner(tmp_path, config) as running,
        FakeWorker(running.address).working() as worker,
    ):
        await asyncio.wait_for(running.task, 20)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert len(worker.receipts) >= 4 * 3 * 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["trajectories"]["trained"] == 4 * 3 * 2
