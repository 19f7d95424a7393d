"""A small policy and tasks for it, made once."""

import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import FaultRun, spec, write_tasks
from tests.faults.small_policy import write_policy
from tests.support.shared_folders import SharedFolders


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def policy(tasks: Path, shared_folders: SharedFolders) -> Path:
    corpus = [tasks.read_text()]
    return shared_folders.filled_by(lambda path: write_policy(path, corpus), "small-policy")


@pytest.fixture
async def new_run(
    tmp_path: Path, policy: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Callable[..., FaultRun]]:
    """Makes the run of a spec with changes to its sections; what it leaves running is killed."""
    monkeypatch.setenv("FLOTILLA_TEST_TASKS", str(tasks))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    made: list[FaultRun] = []

    def make(*, learner: dict[str, Any] | None = None, **sections: Any) -> FaultRun:
        wish = spec(policy, tasks, **(learner or {}))
        for name, changes in sections.items():
            wish[name] = {**wish[name], **changes} if isinstance(changes, dict) else changes
        made.append(FaultRun(tmp_path, wish))
        return made[-1]

    yield make
    for run in made:
        await run.end()
