"""A whole run with every tracker on, and canaries for all secrets: where any of them gets to."""

import asyncio
import re
import resource
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from tests.faults.harness import (
    ENVIRONMENTS,
    GATEWAY,
    LAUNCHER,
    LEARNER,
    RANK,
    ROLLOUT,
    WEIGHTS,
    FaultRun,
)
from tests.support.canary import HOOK, REMOTE_LAUNCHER, Canaries
from tests.support.doctor import double

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# From a user's shell; no service here uses them.
OTHERS = {
    "OPENAI_API_KEY": "canary-openai-0123456789abcdef",
    "GITHUB_PAT": "canary-github-0123456789abcdef",
    "DATABASE_URL": "canary-database-0123456789abcdef",
    # By the spec, under another name, for the environment's server.
    "APP_LOGIN": "canary-app-0123456789abcdef",
}
# Who starts all the others, and hands to each what it has a use for.
HOLDERS = {"flotilla_launcher.cli.app", LAUNCHER}
# All that anybody else may have in its environment.
GIVEN = {
    GATEWAY: {"APP_LOGIN"},
    ENVIRONMENTS: {"APP_LOGIN"},
    LEARNER: {"WANDB_API_KEY"},
    "wandb-core": {"WANDB_API_KEY"},
    RANK: set[str](),
    WEIGHTS: set[str](),
    ROLLOUT: set[str](),
}
DUMP = re.compile(r"core(\.\d+)?")
METRICS = re.compile(r'"address": "(http://[^"]+/metrics)"')


class Onlooker:
    """Another process of the same user, who looks at everything that runs, again and again."""

    def __init__(self, canaries: Canaries, run: FaultRun) -> None:
        self._canaries = canaries
        self._run = run
        self.argv: dict[str, set[str]] = {}
        self.environments: dict[str, set[str]] = defaultdict(set)
        self.core_bytes: set[int] = set()
        self.metrics = b""

    async def look(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(0.1)

    def _look(self) -> None:
        self.argv |= self._canaries.on_command_lines()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, OSError):
                role = role_of(process.cmdline())
                # Of its parent, until it has become what it is.
                found = self._canaries.in_environments([process])[process.pid]
                self.environments[role] |= found
                self.core_bytes.add(process.rlimit(resource.RLIMIT_CORE)[0])

    def read_metrics(self) -> None:
        for log in self._run.folder.glob("logs/*.log"):
            for url in METRICS.findall(log.read_text()):
                with urlopen(url, timeout=10) as answer:
                    self.metrics += answer.read()


def role_of(words: list[str]) -> str:
    if "-m" in words:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words else ""


def accept(path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[int, Any]:
    return 200, {"ok": True, "channel": "C1", "ts": "1700000000.000001"}


def environ(canaries: Canaries, hook: str, home: Path) -> dict[str, str]:
    canaries.values |= OTHERS
    given = {**canaries.environ(hook), **OTHERS, "FLOTILLA_TRACE": "1"}
    # That a launcher is elsewhere.
    del given[REMOTE_LAUNCHER]
    given["DATABASE_URL"] = f"postgres://app:{OTHERS['DATABASE_URL']}@db.example.org/runs"
    folders = {name: str(home / name.lower()) for name in ("HOME", "TMPDIR")}
    for folder in folders.values():
        Path(folder).mkdir(parents=True)
    return {**given, **folders}


def sections(hook: str) -> dict[str, Any]:
    server = {
        "command": ["python", "-m", ENVIRONMENTS],
        "instances": True,
        "env": {"APP_TOKEN": "$APP_LOGIN", "APP_MODE": "strict"},
    }
    notify = {"slack": {"channel": "C1", "api_url": f"{hook}/api"}, "webhook_env": HOOK}
    return {
        "env_gateway": {"backend": "mcp", "servers": [server]},
        "launcher": {"metrics": True, "notify": notify},
        "learner": {
            "steps": 2,
            "tracking": {
                "backends": ["jsonl", "console", "wandb", "tensorboard"],
                "mode": "offline",
            },
        },
    }


async def test_a_whole_run_leaves_no_secret_anywhere(
    new_run: Callable[..., FaultRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canaries = Canaries()
    with double(accept) as hook:
        for name, value in environ(canaries, hook, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        run = new_run(**sections(hook))
        onlooker = Onlooker(canaries, run)
        looking = asyncio.create_task(onlooker.look())
        try:
            await run.train()
            await run.step(1)
            await asyncio.to_thread(onlooker.read_metrics)
            await run.completes()
        finally:
            looking.cancel()
    check_processes(onlooker)
    assert b"flotilla_" in onlooker.metrics
    assert canaries.traces(onlooker.metrics + run.output.encode()) == set()
    check_files(canaries, run, tmp_path)


def check_processes(onlooker: Onlooker) -> None:
    assert onlooker.argv == {}
    found = onlooker.environments
    assert found.keys() >= GIVEN.keys(), "each was looked at"
    too_much = {
        role: traces - GIVEN.get(role, set())
        for role, traces in found.items()
        if role not in HOLDERS
    }
    assert {role: traces for role, traces in too_much.items() if traces} == {}
    assert found[LEARNER] == GIVEN[LEARNER] and found[ENVIRONMENTS] == GIVEN[ENVIRONMENTS]
    assert max(onlooker.core_bytes) <= 1, "no process may leave a core dump"


def check_files(canaries: Canaries, run: FaultRun, folder: Path) -> None:
    names = {path.name for path in run.folder.iterdir()}
    assert {"metrics.jsonl", "wandb", "tensorboard", "traces", "logs", "journal.sqlite"} <= names
    assert list(run.folder.glob("wandb/**/*.wandb")), "the offline folder was written"
    assert canaries.in_files(folder, kept=False) == {}
    assert [path for path in folder.rglob("core*") if DUMP.fullmatch(path.name)] == []
    open_ones = [
        path
        for path in run.runs.rglob("*")
        if not path.is_symlink() and path.lstat().st_mode & 0o077
    ]
    assert open_ones == []
