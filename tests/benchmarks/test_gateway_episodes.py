"""`benchmarks.gateway_episodes`, with few episodes."""

import json
import subprocess
import sys

import pytest

from tests.support.repository import ROOT


@pytest.mark.parametrize("servers", ["http", pytest.param("stdio", marks=pytest.mark.slow)])
def test_no_episode_is_lost_or_played_twice_or_left_behind_though_connections_are_cut(
    servers: str,
) -> None:
    command = (sys.executable, "-m", "benchmarks.gateway_episodes", "--servers", servers)
    sizes = ("--episodes", "24", "--concurrency", "8", "--cut-every", "0.5")
    done = subprocess.run((*command, *sizes), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["episodes"] == 24 and figures["cuts"] > 0
    assert figures["lost"] == {} and figures["leaked"] == {} and figures["survivors"] == []
    assert [figures[name] for name in ("wrong", "regraded", "twice", "missed")] == [0, 0, 0, 0]
