import json
from pathlib import Path

import pytest

from environments.tasks import make_task


@pytest.fixture(scope="session")
def policy(engine_folder: Path) -> Path:
    return engine_folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    made = [make_task(env_key, "train", 0) for env_key in ("booking", "tracker")]
    path.write_text(json.dumps(made))
    return path
