"""kill -9 in whole runs of `flotilla train` whose policy sees, on a real vLLM: of the learner, its
rank, the engine or its worker."""

import random
from collections import Counter
from pathlib import Path

import pytest

from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from tests.faults.kills.full_run import VISION, FullRun

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


async def test_a_run_whose_policy_sees_ends_as_if_it_had_never_been_killed(tmp_path: Path) -> None:
    kills: Counter[str] = Counter()
    run = FullRun(tmp_path / "run", random.Random(0), VISION)
    verdict = await run.run(lambda kind: kills.update([kind]))
    assert verdict.good, verdict
    assert kills.total() >= VISION.kills
    assert count_pictures(tmp_path) > 0


def count_pictures(folder: Path) -> int:
    (journal,) = folder.glob(f"run/runs/faults-*/{JOURNAL_FILE}")
    with open_read_only(journal) as db:
        return db.execute("SELECT count(*) FROM pictures").fetchone()[0]
