"""Attempts get all their scores, whatever the teacher does, or the run is told why not."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray

from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence, Trajectory
from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.alarms.types import AlarmVerdict
from flotilla_learner.config.teacher import TeacherConfig
from flotilla_learner.ports import TeacherRefusedError
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.teacher import teacher_desk
from flotilla_learner.teacher.teacher_desk import TeacherDesk
from tests.support.scripted_teacher_server import (
    ScriptedTeacherServer,
    asking,
    serving_teacher,
    write_tokenizer,
)

POLICY = PolicyId(1, 0, b"f" * 32)


def make_attempt(index: int, *authors: tuple[Author, int], sequences: int = 1) -> Trajectory:
    """Sequences with runs of these authors; ids that no two attempts share in their order."""
    spans = tuple(
        Span(author, length, POLICY, 1.0) if author is Author.POLICY else Span(author, length)
        for author, length in authors
    )
    count = sum(length for _, length in authors)
    own = sum(length for author, length in authors if author is Author.POLICY)
    rng = np.random.default_rng(index)
    made = tuple(
        Sequence(rng.integers(0, 64, count).astype(np.int32), spans, np.zeros(own, np.float32))
        for _ in range(sequences)
    )
    return Trajectory(
        key=AttemptKey("g", index, 0),
        lease_id="lease",
        sequences=made,
        reward=1.0,
        content_digest=b"d",
    )


TASKS = {"g": Task("t", "env", '{"key": "t", "data": {"solution": "w3 w4"}}')}
TURNS = ((Author.PROMPT, 3), (Author.POLICY, 2), (Author.ENVIRONMENT, 2), (Author.POLICY, 3))


class WordRenderer:
    """Renders the words of `write_tokenizer` as their ids. Implements `ports.HintRenderer`."""

    def __init__(self, first_id: int | None = None) -> None:
        self.first_id = first_id

    def render_message(self, text: str) -> NDArray[np.int32]:
        return np.array([int(word[1:]) for word in text.split()], np.int32)


@asynccontextmanager
async def desk_at(
    tmp_path: Path,
    *,
    top_k: int = 0,
    verdicts: list[AlarmVerdict] | None = None,
    renderer: WordRenderer | None = None,
    **config: Any,
) -> AsyncGenerator[tuple[TeacherDesk, ScriptedTeacherServer]]:
    own = write_tokenizer(tmp_path / "policy")
    told = [] if verdicts is None else verdicts
    async with (
        serving_teacher(ScriptedTeacherServer(own)) as server,
        asking(server, own, top_k=top_k, **config) as teacher,
    ):
        settings = TeacherConfig.model_validate({"url": server.url, **config})
        yield TeacherDesk(teacher, settings, renderer, apply_verdict=told.append), server


def expected_scores(server: ScriptedTeacherServer, attempt: Trajectory) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for sequence in attempt.sequences:
        ids = sequence.token_ids
        own = np.repeat(
            [s.author is Author.POLICY for s in sequence.spans],
            [s.length for s in sequence.spans],
        )
        places = np.flatnonzero(own)
        found.append(server.table[ids[places - 1], ids[places]].astype(np.float32))
    return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_desk, "_FIRST_PAUSE_S", 0.01)


async def test_every_policy_token_of_every_sequence_is_scored(tmp_path: Path) -> None:
    attempts = [make_attempt(n, *TURNS, sequences=2) for n in range(5)]
    async with desk_at(tmp_path, top_k=3) as (desk, server):
        found = await desk.score_attempts(attempts, TASKS)
        for attempt in attempts:
            for own, scores in zip(
                expected_scores(server, attempt), found[attempt.key], strict=True
            ):
                np.testing.assert_array_equal(scores.logprobs, own)
                assert scores.top_ids.shape == (len(own), 3)


async def test_nothing_after_the_last_policy_token_is_sent(tmp_path: Path) -> None:
    attempt = make_attempt(0, *TURNS, (Author.ENVIRONMENT, 50))
    async with desk_at(tmp_path) as (desk, server):
        await desk.score_attempts([attempt], TASKS)
        assert [len(body["prompt"]) for body in server.asked] == [10]


async def test_sequences_without_policy_tokens_ask_nothing(tmp_path: Path) -> None:
    attempt = make_attempt(0, (Author.PROMPT, 4))
    async with desk_at(tmp_path, top_k=2) as (desk, server):
        (scores,) = (await desk.score_attempts([attempt], TASKS))[attempt.key]
        assert scores.top_logprobs.shape == (0, 2)
        assert not server.asked
        assert await desk.score_attempts([], {}) == {}


async def test_as_many_are_asked_at_once_as_the_spec_says(tmp_path: Path) -> None:
    async def slow(choice: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    async with desk_at(tmp_path, concurrency=3) as (desk, server):
        server.faults.extend([slow] * 9)
        await desk.score_attempts([make_attempt(n, *TURNS) for n in range(9)], TASKS)
        assert server.busiest == 3


async def fail(choice: dict[str, Any]) -> web.Response:
    return web.Response(status=503, text="loading")


@pytest.mark.usefixtures("hasty")
async def test_a_teacher_that_fails_is_asked_again_and_no_number_changes(tmp_path: Path) -> None:
    attempts = [make_attempt(n, *TURNS) for n in range(4)]
    async with desk_at(tmp_path) as (desk, server):
        server.faults.extend([fail] * 6)
        found = await desk.score_attempts(attempts, TASKS)
        for attempt in attempts:
            (own,) = expected_scores(server, attempt)
            np.testing.assert_array_equal(found[attempt.key][0].logprobs, own)
        metrics = desk.take_metrics()
        assert metrics["teacher/retries"] == 6.0 and metrics["teacher/seconds"] > 0
        assert desk.take_metrics() == {"teacher/seconds": 0.0, "teacher/retries": 0.0}


@pytest.mark.usefixtures("hasty")
async def test_a_teacher_that_stays_away_is_reported_until_it_answers(tmp_path: Path) -> None:
    verdicts: list[AlarmVerdict] = []
    async with desk_at(tmp_path, verdicts=verdicts, patience_s=0.02) as (desk, server):
        server.faults.extend([fail] * 6)
        await desk.score_attempts([make_attempt(0, *TURNS)], TASKS)
    bad = [verdict for verdict in verdicts if verdict.bad]
    assert {verdict.rule for verdict in verdicts} == {"teacher_down"}
    assert bad and "503: loading" in bad[0].cause
    assert verdicts[-1].bad is False


async def test_a_short_failure_is_not_reported_however_long_nobody_had_asked(
    tmp_path: Path,
) -> None:
    verdicts: list[AlarmVerdict] = []
    async with desk_at(tmp_path, verdicts=verdicts, patience_s=0.3) as (desk, server):
        await desk.score_attempts([make_attempt(0, *TURNS)], TASKS)
        await asyncio.sleep(0.4)
        server.faults.append(fail)
        await desk.score_attempts([make_attempt(1, *TURNS)], TASKS)
    assert not any(verdict.bad for verdict in verdicts)


async def test_a_refusal_ends_the_other_questions(tmp_path: Path) -> None:
    async def hang(choice: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async def spoil(choice: dict[str, Any]) -> None:
        choice["prompt_token_ids"] = []

    async with desk_at(tmp_path) as (desk, server):
        server.faults.extend([hang, hang, spoil])
        async with asyncio.timeout(10):
            with pytest.raises(TeacherRefusedError, match="other token ids"):
                await desk.score_attempts([make_attempt(n, *TURNS) for n in range(3)], TASKS)


@pytest.mark.usefixtures("hasty")
async def test_a_run_waits_for_a_teacher_that_still_loads(tmp_path: Path) -> None:
    async with desk_at(tmp_path) as (desk, server):
        server.faults.extend([fail] * 3)
        await desk.open()
        assert len(server.asked) == 4


HINT = {"key": "data.solution", "message": "w7 {hint}"}


@pytest.mark.parametrize("begins", [False, True])
async def test_a_hint_stands_before_the_attempt_and_the_same_tokens_are_scored_after_it(
    tmp_path: Path, begins: bool
) -> None:
    """After the token that begins every conversation, where there is one."""
    attempt = make_attempt(0, *TURNS)
    ids = attempt.sequences[0].token_ids.tolist()
    renderer = WordRenderer(ids[0] if begins else None)
    async with desk_at(tmp_path, renderer=renderer, hint=HINT) as (desk, server):
        (scores,) = (await desk.score_attempts([attempt], TASKS))[attempt.key]
        (own,) = expected_scores(server, attempt)
    at = int(begins)
    assert server.asked[0]["prompt"] == [*ids[:at], 7, 3, 4, *ids[at:]]
    np.testing.assert_array_equal(scores.logprobs, own)


async def test_the_teacher_must_have_room_for_the_longest_hint(tmp_path: Path) -> None:
    tasks = [Task(str(n), "env", json.dumps({"data": {"solution": "w1 " * n}})) for n in (1, 9, 4)]
    async with desk_at(tmp_path, renderer=WordRenderer(), hint=HINT) as (desk, server):
        server.max_model_len = 128 + 1 + 1 + 9
        await desk.open(tasks)
        server.max_model_len -= 1
        with pytest.raises(TeacherRefusedError, match="--max-model-len 139"):
            await desk.open(tasks)


async def test_tasks_without_a_hint_are_counted_before_anything_is_asked(tmp_path: Path) -> None:
    texts = ('{"data": {"solution": "w1"}}', "{}", '{"data": {"solution": 3}}', '{"data": "w1"}')
    tasks = [Task(str(n), "env", text) for n, text in enumerate(texts)]
    async with desk_at(tmp_path, renderer=WordRenderer(), hint=HINT) as (desk, server):
        with pytest.raises(ConfigError, match=r"task '1' has no text .* nor have 2 others of 4"):
            await desk.open(tasks)
        assert not server.asked


async def test_attempts_that_wait_are_scored_ahead_and_asked_about_once(tmp_path: Path) -> None:
    attempts = {each.key: each for each in (make_attempt(n, *TURNS, sequences=2) for n in range(3))}
    kept = dict(list(attempts.items())[:2])
    waiting = [attempts, kept]

    def list_waiting() -> dict[AttemptKey, Task]:
        nonlocal looked
        looked += 1
        # The third is dropped as too old meanwhile.
        chosen = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return dict.fromkeys(chosen, TASKS["g"])

    async def load(keys: Items[AttemptKey]) -> list[Trajectory]:
        loaded.append(len(keys))
        return [attempts[key] for key in keys]

    looked, loaded = 0, list[int]()
    async with desk_at(tmp_path) as (desk, server):
        async with running_tasks(desk.work_ahead(list_waiting, load)):
            async with asyncio.timeout(10):
                await until_true(lambda: looked == 2)
        assert loaded == [3]
        found = await desk.score_attempts(list(attempts.values()), TASKS)
        # The dropped one's two sequences are asked about again, since its scores were let go.
        assert len(server.asked) == 6 + 2
        for attempt in attempts.values():
            pairs = zip(expected_scores(server, attempt), found[attempt.key], strict=True)
            for own, scores in pairs:
                np.testing.assert_array_equal(scores.logprobs, own)


async def until_true(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.01)
