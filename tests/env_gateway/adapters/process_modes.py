"""The two ways in which child processes end together."""

import pytest

from flotilla_env_gateway.adapters import process_namespace

MODES = ["namespace", "reaper"]


def use_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes be started in this way."""
    if mode == "reaper":
        monkeypatch.setattr(process_namespace, "find_bubblewrap", lambda: None)
    elif process_namespace.find_bubblewrap() is None:
        pytest.skip("NOTHING was tested of process namespaces: bubblewrap does not work here")
