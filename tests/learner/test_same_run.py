"""What a learner says that goes on with a run under another order of tasks."""

from pathlib import Path

import pytest

from services.learner.journal.store import open_journal
from services.learner.same_run import check_tasks_are_the_same
from services.learner.sampling.tasks import load_tasks
from tests.learner.support import make_config


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"groups_per_step": 4}, True),
        ({"sampling": {"mixing": "proportional"}}, True),
        ({"sampling": {"difficulty": {"enabled": True}}}, True),
    ],
)
async def test_another_order_of_tasks_is_used_with_a_warning(
    tmp_path: Path, changes: dict[str, object], warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = open_journal(tmp_path / "run")
    try:
        for config in (make_config(tmp_path), make_config(tmp_path, **changes)):
            tasks = load_tasks(Path(config.tasks))
            await check_tasks_are_the_same(journal, tasks, config, 0)
    finally:
        await journal.close()
    out, err = capfd.readouterr()
    assert ("tasks come in another order from here on" in out + err) == warns
