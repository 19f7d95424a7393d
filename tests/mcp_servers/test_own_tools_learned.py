"""The evening on a laptop: tasks are made from a public server, and a tiny policy learns them. It
takes a quarter of an hour or more: `pytest -m "mcp_servers and slow" tests/mcp_servers`."""

import json
from pathlib import Path

import pytest

from benchmarks.own_tools import measure_server

pytestmark = [pytest.mark.mcp_servers, pytest.mark.slow]

LEAST_GAIN = 0.3


@pytest.mark.timeout(3_600)
def test_a_tiny_policy_learns_the_tools_of_files(tmp_path: Path) -> None:
    entry = measure_server("filesystem", 0, 40, tmp_path)
    assert [phase["code"] for phase in entry["phases"].values()] == [0, 0], json.dumps(entry)
    base, warm, last = (row["heldout"]["mean"] for row in entry["rows"].values())
    assert last - base >= LEAST_GAIN, json.dumps(entry["rows"])
    assert last >= warm - LEAST_GAIN / 2
    assert {row["heldout"]["tasks"] for row in entry["rows"].values()} == {20}
