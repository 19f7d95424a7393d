import pytest


@pytest.fixture(scope="session", autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Set before the first test of a rank."""
