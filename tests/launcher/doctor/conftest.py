import json
from pathlib import Path

import pytest

from flotilla_environments.tasks import make_task
from flotilla_launcher.doctor.adapters import gateway_probe
from flotilla_launcher.doctor.findings import Finding


@pytest.fixture(scope="session")
def policy(engine_folder: Path) -> Path:
    return engine_folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    made = [make_task(env_key, "train", 0) for env_key in ("booking", "tracker")]
    path.write_text(json.dumps(made))
    return path


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the length of prompts to its own tests."""

    async def count_nothing(*_: object) -> dict[str, Finding]:
        return {}

    monkeypatch.setattr(gateway_probe, "check_prompts", count_nothing)
