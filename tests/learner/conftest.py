"""What all tests of the learner begin with."""

import pytest

from services.common.weights.network_interfaces import INTERFACE_VARIABLES


@pytest.fixture(autouse=True)
def environment_of_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines switch torch's compiler off for their process, and ranks that meet in it choose its
    network interface."""
    for name in ("TORCHDYNAMO_DISABLE", *INTERFACE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
