"""What all tests of the learner begin with."""

import pytest


@pytest.fixture(autouse=True)
def torchs_compiler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of engines switch it off for their process."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
