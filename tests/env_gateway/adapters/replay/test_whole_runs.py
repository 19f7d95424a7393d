"""A recorded run, and its replay without an environment: real gateway processes, and the rollout's
own loop with an engine by script."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla_common.domain.attempts import AttemptKey, FailureKind, NoGradeReason
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc import rpc
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.episodes.episode import Attempt
from flotilla_rollout.types import Sampling
from tests.support.gateway_process import TOKEN, open_episode, serving_process, write_spec
from tests.support.rollout import runner
from tests.support.waiting import until

RECORDING = """
[env_gateway]
backend = "embedded"
record = true
"""
# Nothing of this but the last table is there: a replay replaces it all.
REPLAY = """
[env_gateway]
backend = "replay"
[[env_gateway.servers]]
name = "gone"
url = "http://127.0.0.1:1"
headers = {{ "x-api-key" = "$NOT_SET" }}
[env_gateway.environments.booking]
backend = "fleet"
[env_gateway.environments.shop]
backend = "mcp"
servers = ["gone"]
[env_gateway.backends.replay]
run = "{run}"
"""
LIMITS: dict[str, Any] = {
    "max_turns": 12,
    "max_input_length": 20_000,
    "max_generate_length": 4000,
    "max_model_len": 40_000,
    "attempt_timeout_s": 60.0,
    "call_timeout_s": 20.0,
    "grade_timeout_s": 30.0,
}
TASKS = [make_task(app, "train", n) for app in ("booking", "tracker", "shop") for n in range(2)]


def script(task: Mapping[str, Any], attempt: int) -> list[str]:
    """The turns of an attempt: the first solves its task, the others stop after a call."""
    made = [{"name": name, "arguments": arguments} for name, arguments in plan_calls(task)]
    calls = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in made]
    return [*(calls[:1] if attempt else calls), "It is done. <done>"]


async def play(
    address: str, task: Mapping[str, Any], attempt: int, texts: Sequence[str]
) -> Trajectory:
    async with rpc.channel(address, token=TOKEN) as channel:
        environment = GatewayEnvironment(
            channel, run_id="run", worker_id="rollout-0", renew_interval_s=15.0
        )
        key = AttemptKey(f"group-{task['key']}", attempt, 0)
        played = Attempt(key, json.dumps(task), Sampling(1.0, 7), 1, 120.0)
        trajectory = await runner(environment, texts, **LIMITS).run_attempt(played)
        await environment.wait_until_closed()
        return trajectory


async def play_all(address: str) -> list[Trajectory]:
    return await asyncio.gather(
        *(play(address, task, n, script(task, n)) for task in TASKS for n in range(2))
    )


def told(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but times and names."""
    (sequence,) = trajectory.sequences
    return {
        "tokens": sequence.token_ids.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "spans": trajectory.spans,
        "digest": trajectory.content_digest,
        "reward": trajectory.reward,
        "checks": (trajectory.checks_passed, trajectory.checks_failed),
        "stop": trajectory.stop_reason,
        "tools": trajectory.facts.tool_schema_digest,
        "versions": (trajectory.facts.env_version, trajectory.facts.data_version),
    }


async def test_a_replay_without_environments_gives_the_same_grades_and_tokens(
    tmp_path: Path,
) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    for folder in (recorded, replayed):
        folder.mkdir()
    async with serving_process(recorded, RECORDING) as (_, address):
        first = await play_all(address)
    assert [trajectory.reward for trajectory in first] == [1.0, 0.0] * len(TASKS)
    section = REPLAY.format(run=recorded)
    async with serving_process(replayed, section) as (_, address):
        assert list(map(told, await play_all(address))) == list(map(told, first))
        assert list(map(told, await play_all(address))) == list(map(told, first)), "again"
        task = TASKS[0]
        # The first attempt's number with the second one's calls: their recording is there.
        other = await play(address, task, 0, script(task, 1))
        assert told(other) == told(first[1])
        misses = [
            await play(address, task, 0, [script(task, 0)[0].replace("Nina", "Otto")]),
            await play(address, task, 0, ["It is not. <done>"]),
            await play(address, make_task("booking", "train", 7), 0, ["<done>"]),
            await play(address, task | {"data_id": "train-000009"}, 0, ["<done>"]),
        ]
    for trajectory in misses:
        assert trajectory.failure is FailureKind.NO_GRADE
        assert (trajectory.reward, trajectory.no_grade) == (None, NoGradeReason.REPLAY_MISS)
    words = [trajectory.detail for trajectory in misses]
    assert "has no call" in words[0] and "has no grade" in words[1]
    assert "opened no episode of task 'booking-train-000007'" in words[2]
    assert "whose environment, version, data or variables are these" in words[3]


async def test_a_killed_gateway_loses_at_most_the_episodes_that_had_not_ended(
    tmp_path: Path,
) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    for folder in (recorded, replayed):
        folder.mkdir()
    task = TASKS[0]
    async with serving_process(recorded, RECORDING) as (process, address):
        whole = await play(address, task, 0, script(task, 0))
        async with rpc.channel(address, token=TOKEN) as channel:
            await open_episode(EpisodeServiceStub(channel), 1)
            files = recorded / "recording" / "episodes"
            # Written, not only made: a file is empty until its first line is there.
            await until(lambda: sum(file.stat().st_size > 0 for file in files.iterdir()) >= 2)
        process.kill()
        await process.wait()
    async with serving_process(replayed, REPLAY.format(run=recorded)) as (_, address):
        assert told(await play(address, task, 0, script(task, 0))) == told(whole)
        lost = await play(address, make_task("booking", "train", 1), 1, ["<done>"])
    assert lost.no_grade == NoGradeReason.REPLAY_MISS
    assert "cut here: the gateway that recorded it ended" in lost.detail


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "runs/RUN_ID"), (b'{"flotilla_recording": 99}', "record the run again")],
)
def test_a_folder_without_a_recording_is_an_error_before_anything_starts(
    content: bytes | None, named: str, tmp_path: Path
) -> None:
    (tmp_path / "recording").mkdir()
    if content is not None:
        (tmp_path / "recording" / "format.json").write_bytes(content)
    spec = write_spec(tmp_path, REPLAY.format(run=tmp_path))
    command = [sys.executable, "-m", "flotilla_env_gateway", "--config", str(spec)]
    ended = subprocess.run(
        [*command, "--run-dir", str(tmp_path)],
        capture_output=True,
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN},
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "env_gateway.backends.replay.run" in ended.stderr and named in ended.stderr


async def test_gateways_of_one_run_share_its_recording(tmp_path: Path) -> None:
    for folder in ("run", "replayed"):
        (tmp_path / folder).mkdir()
    run = tmp_path / "run"
    async with (
        serving_process(run, RECORDING) as (_, one),
        serving_process(run, RECORDING) as (_, other),
    ):
        first = await play(one, TASKS[0], 0, script(TASKS[0], 0))
        second = await play(other, TASKS[1], 0, script(TASKS[1], 0))
    async with serving_process(tmp_path / "replayed", REPLAY.format(run=run)) as (_, address):
        assert told(await play(address, TASKS[0], 0, script(TASKS[0], 0))) == told(first)
        assert told(await play(address, TASKS[1], 0, script(TASKS[1], 0))) == told(second)
