"""The same tasks, played in the same way, embedded, over MCP and through an emulated Fleet."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from flotilla_env_gateway.ports import Text
from flotilla_environments.api import ENV_KEYS, open_instance
from flotilla_environments.reference_policies import plan_calls, play_randomly
from flotilla_environments.tasks import make_task
from tests.env_gateway.backends.bench import TIMEOUT_S, Bench, opened_bench
from tests.env_gateway.backends.harness import Call, load_harness

TASKS = [make_task(env_key, "train", index) for index in range(2) for env_key in ENV_KEYS]


@dataclass(frozen=True)
class Transcript:
    """All information on an attempt that a policy and a learner receive."""

    tools: Sequence[Any]
    answers: Sequence[Any]
    reward: float | None
    passed: Sequence[str]
    failed: Sequence[str]


def solved(task: Mapping[str, Any]) -> list[Call]:
    return plan_calls(task)


def halfway(task: Mapping[str, Any]) -> list[Call]:
    return plan_calls(task)[:-1]


def wandering(task: Mapping[str, Any]) -> list[Call]:
    """Random calls, many of them refused, and one that no tool can take."""
    calls: list[Call] = []
    instance = open_instance(task["env_id"], task["data_id"])

    def call(name: str, arguments: dict[str, Any]) -> Any:
        calls.append((name, arguments))
        return instance.call(name, arguments)

    play_randomly(task["prompt"], instance.tools(), call, random.Random(task["key"]), max_calls=9)
    wrong = instance.tools()[0].name
    return [*calls, (wrong, {"nonsense": "x"})]


PLAYS = (solved, halfway, wandering)


async def played(bench: Bench, attempt: int) -> Transcript:
    index, how = divmod(attempt, len(PLAYS))
    session = await bench.open(attempt, task=index)
    answers = [await bench.call(session, call) for call in PLAYS[how](TASKS[index])]
    grade = await bench.gateway.grade_episode(session, "done", None, TIMEOUT_S)
    tools = session.tools.values()
    return Transcript(
        [(t.name, t.description, t.input_schema_json, t.read_only, t.idempotent) for t in tools],
        [(a.outcome, [p.text if isinstance(p, Text) else p for p in a.parts]) for a in answers],
        grade.reward,
        grade.checks_passed,
        grade.checks_failed,
    )


async def transcripts(way: str) -> list[Transcript]:
    """Every task in every play, all at once."""
    harness: Any = load_harness(way)
    harness.task = TASKS.__getitem__
    harness.start()
    try:
        async with opened_bench(harness) as bench:
            attempts = range(len(TASKS) * len(PLAYS))
            return await asyncio.gather(*(played(bench, attempt) for attempt in attempts))
    finally:
        harness.stop()


@pytest.fixture(scope="module")
def embedded() -> list[Transcript]:
    return asyncio.run(transcripts("embedded"))


def test_a_solution_passes_and_half_of_one_does_not(embedded: list[Transcript]) -> None:
    rewards = [transcript.reward for transcript in embedded]
    assert rewards[0::3] == [1.0] * len(TASKS)
    assert rewards[1::3] == [0.0] * len(TASKS)
    assert None not in rewards


@pytest.mark.parametrize("way", ["mcp", "fleet"])
def test_transcripts_and_rewards_do_not_depend_on_the_way(
    embedded: list[Transcript], way: str
) -> None:
    for ours, theirs in zip(embedded, asyncio.run(transcripts(way)), strict=True):
        assert theirs == ours
