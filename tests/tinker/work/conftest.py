"""Desks that keep house so often that no test waits for it."""

import pytest


@pytest.fixture(autouse=True)
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla_tinker.work.desk._LOOK_S", 0.05)
