"""Delays from a learner's alarm until people see it: real processes throughout."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flotilla_launcher.store.ledger import Ledger
from tests.support.launcher import spec, start_cli
from tests.support.learner import write_tasks
from tests.support.waiting import until

# The required bound for each channel of an alarm.
LIMIT_S = 2.0
WORDS = "KeyError: 'notes'\x1b[2J\x07 (line 3 of the verifier)\nand a second line"
SHOWN = "execution_failed: KeyError: 'notes' (line 3 of the verifier)"


@dataclass
class Seen:
    """Times at which each channel has shown the alarm, in seconds since the epoch."""

    at: dict[str, float] = field(default_factory=dict[str, float])
    texts: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, way: str, text: str) -> None:
        if "failing" in text and way not in self.at:
            self.at[way], self.texts[way] = time.time(), text


@asynccontextmanager
async def hooks(seen: Seen) -> AsyncGenerator[str]:
    """A server that takes messages; the last part of the path names the channel."""

    async def take(request: web.Request) -> web.Response:
        seen.note(request.match_info["way"], await request.text())
        return web.Response()

    app = web.Application()
    app.router.add_post("/{way}", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


def failing_spec(folder: Path) -> dict[str, Any]:
    """A run in which no attempt gets a grade, with the default heartbeat interval."""
    modules = {
        "learner": "tests.launcher.cli.alarming_learner",
        "rollout": "tests.launcher.cli.alarming_rollout",
        "env_gateway": "tests.support.fake_env_gateway",
    }
    learner = {
        "tasks": str(write_tasks(folder / "tasks.json", envs=1)),
        "steps": 2,
        "groups_per_step": 2,
        "group_size": 2,
        "alarms": {"failing_tries": 8},
    }
    launcher = {
        "modules": modules,
        "heartbeat_interval_s": 1.0,
        "notify": {"webhook_env": "ALARM_TEST_HOOK"},
    }
    wish = spec(launcher=launcher, learner=learner, rollout={"words": WORDS})
    return {**wish, "policy": {"model": "none", "max_model_len": 128}}


async def read_board(process: asyncio.subprocess.Process, seen: Seen, lines: list[str]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        lines.append(line.decode())
        seen.note("board", lines[-1])


async def watch_ledger(runs: Path, seen: Seen) -> str:
    """Poll the ledger, as `flotilla status` does, until the alarm is there; return the run's id."""
    await until((runs / "launcher.sqlite").exists, 90.0)
    with closing(Ledger(runs / "launcher.sqlite")) as store:
        while "status" not in seen.at:
            for stored in store.list_newest():
                seen.note("status", " ".join(f"{a.rule}: {a.cause}" for a in stored.alarms))
            await asyncio.sleep(0.02)
        return store.list_newest()[0].run.run_id


@pytest.mark.slow
async def test_an_alarm_is_on_board_status_and_webhook_within_two_seconds_of_being_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    seen, runs, lines = Seen(), tmp_path / "runs", list[str]()
    async with hooks(seen) as hook:
        monkeypatch.setenv("ALARM_TEST_HOOK", f"{hook}/launcher")
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(failing_spec(tmp_path)))
        process = await start_cli("train", str(path), "--runs", str(runs))
        reading = asyncio.create_task(read_board(process, seen, lines))
        try:
            async with asyncio.timeout(90):
                run_id = await watch_ledger(runs, seen)
                await until(lambda: len(seen.at) >= 3, 90.0)
                status = await start_cli("status", run_id, "--runs", str(runs))
                shown, _ = await status.communicate()
        finally:
            os.killpg(process.pid, signal.SIGINT)
            await asyncio.wait_for(process.wait(), 60)
            await reading
            print("".join(lines)[-3000:], seen)
    (raised,) = [
        each
        for line in (runs / run_id / "alarms.jsonl").read_text().splitlines()
        if (each := json.loads(line))["alarm"] == "failing_environment"
    ]
    delays = {way: at - raised["time"] for way, at in seen.at.items()}
    record_property("delays", delays)
    print(f"seconds from raise to {delays}")
    assert max(delays.values()) < LIMIT_S
    texts = {**seen.texts, "command": re.sub(r"\s+", " ", shown.decode())}
    for way, text in texts.items():
        assert SHOWN in text.replace("\\u0027", "'"), (way, text)
        assert "\x1b[2J" not in text and "\x07" not in text, way
        assert "a second line" not in text, way
