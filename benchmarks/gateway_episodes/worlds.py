"""What is played: servers that count their calls, and episodes whose grade is known beforehand."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

from benchmarks.gateway_call import ROOT, make_section, run_mcp_server
from flotilla_environments.app import Call
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task

ENVIRONMENTS = ("booking", "tracker", "shop")
_LEDGER = "ledger"


@dataclass(frozen=True)
class Play:
    """One episode: its task, the calls of its scripted policy, and the reward that they earn."""

    task: dict[str, Any]
    calls: list[Call]
    reward: float


class World(Protocol):
    """Environments that are played."""

    section: dict[str, Any]

    def plan(self, number: int) -> Play:
        """Return an episode; every fourth leaves out the last call and earns nothing."""
        ...

    def count_instances(self) -> int:
        """Return the number of instances at the server."""
        ...

    def count_calls(self) -> Counter[str]:
        """Return how often the servers executed each call; none is sent in two episodes."""
        ...


def _spoil(task: dict[str, Any], calls: list[Call], number: int) -> Play:
    return Play(task, calls[:-1], 0.0) if number % 4 == 3 else Play(task, calls, 1.0)


def _count_lines(folder: Path) -> Counter[str]:
    return Counter((folder / _LEDGER).read_text().splitlines())


class InstancesOverHttp:
    """Apps of this repository behind one MCP server, each episode with an instance of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.section = make_section(url)
        self._folder = folder
        self._url = url

    def plan(self, number: int) -> Play:
        index, turn = divmod(number, len(ENVIRONMENTS))
        task = make_task(ENVIRONMENTS[turn], "train", index)
        return _spoil(task, plan_calls(task), number)

    def count_instances(self) -> int:
        with urlopen(f"{self._url}/health", timeout=30.0) as answer:
            return json.load(answer)["instances"]

    def count_calls(self) -> Counter[str]:
        return _count_lines(self._folder)


_VERIFIER = """
def noted(env, final_answer=None):
    notes = env.call_tool("read").split()
    return 1 if len(notes) == 2 and len({note.split("-")[0] for note in notes}) == 1 else 0
"""


class WarmProcesses:
    """Notes in a folder, each episode with a process over stdio that was started ahead."""

    def __init__(self, folder: Path, size: int) -> None:
        digests = folder / "digests"
        digests.write_text(f"{hashlib.sha256(_VERIFIER.encode()).hexdigest()}  notes.py\n")
        script = ROOT / "benchmarks/gateway_episodes/counted_notes.py"
        server = {
            "transport": "stdio",
            "command": [sys.executable, "-S", str(script), str(folder / _LEDGER)],
            "task_variables": False,
            "state_in_folder": True,
        }
        self.section: dict[str, Any] = {
            "backend": "mcp",
            "servers": [server],
            "warm_starts": {"size": size, "starts_per_s": 100.0},
            "verifiers": {"digests": str(digests)},
        }
        self._folder = folder

    def plan(self, number: int) -> Play:
        task = {
            "key": f"notes-{number}",
            "env_id": "notes",
            "prompt": "Write two notes.",
            "verifier_func": _VERIFIER,
        }
        calls: list[Call] = [("add", {"note": f"{number}-{each}"}) for each in "ab"]
        return _spoil(task, calls, number)

    def count_instances(self) -> int:
        return 0  # Its instances are processes and folders, which are counted for all.

    def count_calls(self) -> Counter[str]:
        return _count_lines(self._folder)


@contextmanager
def serve_http(folder: Path, concurrency: int) -> Generator[World]:
    server = "benchmarks.gateway_episodes.counted_server"
    with run_mcp_server(server, str(folder / _LEDGER)) as url:
        yield InstancesOverHttp(folder, url)


@contextmanager
def serve_stdio(folder: Path, concurrency: int) -> Generator[World]:
    yield WarmProcesses(folder, concurrency + concurrency // 4)


SERVE = {"http": serve_http, "stdio": serve_stdio}
