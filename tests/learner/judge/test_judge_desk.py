"""Whole runs whose groups are judged, with fake ranks and a real endpoint: what is trained on is
what it said, once, whatever happens to either."""

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from aiohttp import web

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_learner.groups.group_endings import GroupEndings
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.judge import judge_desk
from flotilla_learner.ports import JudgeRefusedError
from flotilla_learner.types import TrainBatch
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import RunningLearner, Submission, failed, learner, make_config
from tests.support.repository import ROOT
from tests.support.scripted_judge import (
    COMPLETION_TOKENS,
    MODEL,
    PROMPT_TOKENS,
    JudgedWorker,
    ScriptedJudge,
    asking,
    attempts_of,
    completion,
    judge_config,
    score_of,
    serving_judge,
    write_words,
)
from tests.support.waiting import until

DOCS = ROOT / "docs" / "metrics.md"
ENVS = ("env0", "env1", "env2")


class JudgeTestKill(Exception):
    """Ends a run as a kill would."""


@pytest.fixture
async def server() -> AsyncGenerator[ScriptedJudge]:
    async with serving_judge(ScriptedJudge()) as serving:
        yield serving


@asynccontextmanager
async def judged_run(
    tmp_path: Path,
    server: ScriptedJudge,
    ranks: FakeRanks | None = None,
    *,
    judged: tuple[str, ...] = ENVS,
    **changes: Any,
) -> AsyncGenerator[RunningLearner]:
    """A learner whose groups are judged in the environments `judged`, and a willing worker."""
    table = judge_config(server, **changes.pop("judge", {}))
    config = make_config(tmp_path, judge=table, **changes)
    assert config.judge is not None
    async with (
        asking(config.judge) as judge,
        learner(tmp_path, config, ranks, judge=judge, judged=judged) as running,
    ):
        worker = JudgedWorker(running.address)
        worker.judged = frozenset(judged)
        async with worker.working():
            yield running


async def run_to_the_end(*args: Any, **changes: Any) -> None:
    async with judged_run(*args, **changes) as running:
        await asyncio.wait_for(running.task, 90)


def query(tmp_path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
        return db.execute(sql).fetchall()


def metrics_of(tmp_path: Path) -> list[dict[str, float]]:
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_judged(batch: TrainBatch) -> None:
    """Each attempt has the score that the judge's rule gives to its own first turn."""
    for each in batch.sequences:
        first = each.token_ids[np.flatnonzero(each.policy_mask)[:3]]
        assert each.reward == score_of(write_words(first.tolist()))


def holds(tmp_path: Path) -> bool:
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        return audit_journal(db).holds


async def test_every_group_is_trained_on_its_own_verdict(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    ranks = FakeRanks(tmp_path / "weights")
    await run_to_the_end(tmp_path, server, ranks)
    assert len(ranks.trained) == 3
    for batch in ranks.trained:
        assert batch.sequences
        assert_judged(batch)
    rows = query(tmp_path, "SELECT group_id, scores, model, calls, prompt_tokens FROM verdicts")
    trained = {each.group_id for batch in ranks.trained for each in batch.sequences}
    assert trained <= {row[0] for row in rows}
    assert all(row[2:] == (MODEL, 1, PROMPT_TOKENS) for row in rows)
    assert len({row[0] for row in rows}) == len(rows) <= len(server.asked)
    assert holds(tmp_path)


async def test_judged_attempts_enter_no_metric_of_graded_ones(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    await run_to_the_end(tmp_path, server, judged=("env0",), groups_per_step=6)
    points = metrics_of(tmp_path)
    names = {name for point in points for name in point}
    assert "judge/env0/spread" in names
    assert "reward/env1/pass_at_1" in names
    assert not {name for name in names if name.startswith("reward/env0")}
    assert not {name for name in names if name.startswith("judge/env1")}
    assert sum(point["judge/verdicts"] for point in points) > 0
    assert all(point["judge/failed"] == 0 for point in points)
    tokens = sum(point["judge/completion_tokens"] for point in points)
    assert tokens % COMPLETION_TOKENS == 0
    assert tokens > 0


async def test_every_metric_of_a_judge_is_documented_and_logged(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    await run_to_the_end(tmp_path, server, steps=1)
    (point,) = metrics_of(tmp_path)
    logged = {re.sub("/env\\d/", "/{env}/", name) for name in point if name.startswith("judge/")}
    table = [line for line in DOCS.read_text().splitlines() if "with `learner.judge`" in line]
    names = {name for line in table for name in re.findall(r"`(judge/[^`]+)`", line)}
    assert logged == names


async def test_a_resumed_run_uses_the_journaled_verdict_and_asks_nobody_again(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    def kill(name: str) -> None:
        if name == "train":
            raise JudgeTestKill

    with pytest.raises(JudgeTestKill):
        await run_to_the_end(tmp_path, server, FakeRanks(tmp_path / "w", before=kill))
    known = dict(query(tmp_path, "SELECT group_id, scores FROM verdicts"))
    assert known
    asked = [body["messages"][1]["content"] for body in server.asked]
    ranks = FakeRanks(tmp_path / "w")
    server.asked.clear()
    await run_to_the_end(tmp_path, server, ranks)
    again = dict(query(tmp_path, "SELECT group_id, scores FROM verdicts"))
    assert known.items() <= again.items()
    for batch in ranks.trained:
        assert_judged(batch)
    # Only what had no verdict when the first start ended is asked about again, in the same words.
    repeated = [body for body in server.asked if body["messages"][1]["content"] in asked]
    assert len(repeated) <= len(asked) - len(known)
    assert holds(tmp_path)


async def test_a_learner_that_dies_between_answer_and_journal_asks_the_same_question_again(
    tmp_path: Path, server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise JudgeTestKill

    with monkeypatch.context() as patch:
        patch.setattr("flotilla_learner.journal.attempt_tables.put_verdict", die)
        with pytest.raises(JudgeTestKill):
            await run_to_the_end(tmp_path, server, steps=1)
    assert query(tmp_path, "SELECT * FROM verdicts") == []
    first = server.asked[0]
    server.asked.clear()
    await run_to_the_end(tmp_path, server, steps=1)
    assert first in server.asked
    assert holds(tmp_path)


async def test_a_failed_judge_is_no_grade_for_all_of_the_group_and_the_task_comes_back(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    async def babble_at_first(body: dict[str, Any], number: int) -> web.Response | None:
        babbles = len(body["messages"]) > 2 or number == 1
        if number == 1:
            failing.add(body["messages"][1]["content"])
        if babbles and body["messages"][1]["content"] in failing:
            return web.json_response(completion("They are all fine."))
        return None

    failing = set[str]()
    server.fault = babble_at_first
    ranks = FakeRanks(tmp_path / "weights")
    await run_to_the_end(tmp_path, server, ranks, judge={"tries": 2})
    ((group, calls),) = query(
        tmp_path, "SELECT group_id, calls FROM verdicts WHERE scores IS NULL AND failure != ''"
    )
    assert calls == 2
    outcomes = query(
        tmp_path,
        "SELECT reward, failure, json_extract(summary, '$.no_grade') FROM trajectories"
        f" WHERE group_id = '{group}'",
    )
    assert outcomes == [(None, "no_grade", "judge_failed")] * 2
    state = f"SELECT state, reason FROM groups WHERE group_id = '{group}'"
    assert query(tmp_path, state) == [("dropped", "judge_failed")]
    again = f"SELECT state FROM groups WHERE group_id = '{group[:-1]}1'"
    assert query(tmp_path, again) == [("planned",)]
    assert group not in {each.group_id for batch in ranks.trained for each in batch.sequences}
    assert sum(point["judge/failed"] for point in metrics_of(tmp_path)) == 1
    assert holds(tmp_path)


async def test_a_judge_that_is_down_delays_the_run_and_changes_nothing(
    tmp_path: Path, server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(_: dict[str, Any], number: int) -> web.Response | None:
        return web.Response(status=503) if number <= 6 else None

    monkeypatch.setattr(judge_desk, "_FIRST_PAUSE_S", 0.01)
    server.fault = down
    ranks = FakeRanks(tmp_path / "weights")
    await run_to_the_end(tmp_path, server, ranks, steps=2, judge={"patience_s": 1e-6})
    for batch in ranks.trained:
        assert_judged(batch)
    assert query(tmp_path, "SELECT max(calls) FROM verdicts") == [(1,)], "it was never paid for"
    alarms = (tmp_path / "run" / "alarms.jsonl").read_text()
    assert "judge_down" in alarms
    assert sum(point["judge/retries"] for point in metrics_of(tmp_path)) == 6


async def test_a_run_stops_at_its_budget_and_goes_on_with_a_larger_one(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    with pytest.raises(JudgeRefusedError, match=r"learner\.judge\.max_calls"):
        await run_to_the_end(tmp_path, server, judge={"max_calls": 4, "concurrency": 1})
    assert len(server.asked) == 4
    assert query(tmp_path, "SELECT count(*) FROM verdicts") == [(4,)]
    ranks = FakeRanks(tmp_path / "weights2")
    await run_to_the_end(tmp_path, server, ranks)
    assert ranks.step == 3
    (count,) = query(tmp_path, "SELECT count(*) FROM verdicts")[0]
    assert count == len(server.asked), "no group was asked about twice"
    assert holds(tmp_path)


async def test_groups_that_await_a_verdict_are_not_forgotten_when_the_judge_is_taken_away(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    with pytest.raises(JudgeRefusedError):
        await run_to_the_end(tmp_path, server, judge={"max_calls": 1, "concurrency": 1})
    with pytest.raises(ConfigError, match="await a verdict"):
        async with learner(tmp_path, make_config(tmp_path)) as running:
            await asyncio.wait_for(running.task, 30)


async def test_the_judge_sees_what_was_done_without_names_or_prompts(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    await run_to_the_end(tmp_path, server, steps=1, group_size=4)
    assert server.asked
    for body in server.asked:
        shown = attempts_of(body)
        assert list(shown) == ["A1", "A2", "A3", "A4"]
        assert all(said[0]["role"] == "assistant" for said in shown.values())
        assert body["temperature"] == 0
        text = body["messages"][1]["content"]
        assert "do task" in text
        assert not any(name in text for name in ("g00000", "attempt_index", "worker", "env0"))


async def test_attempts_to_be_judged_are_refused_by_a_run_without_a_judge(tmp_path: Path) -> None:
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = JudgedWorker(running.address)
        with pytest.raises(grpc.aio.AioRpcError, match=r"add \[learner\.judge\]"):
            async with worker.working():
                await asyncio.wait_for(running.task, 10)


async def test_a_verdict_that_was_journaled_without_its_groups_end_still_drops_the_group(
    tmp_path: Path, server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def babble(_body: dict[str, Any], number: int) -> web.Response | None:
        return web.json_response(completion("none")) if number == 1 else None

    def die(*_: Any) -> None:
        raise JudgeTestKill

    server.fault = babble
    limits = {"tries": 1, "concurrency": 1}
    with monkeypatch.context() as patch:
        patch.setattr(GroupEndings, "settle_verdict", die)
        with pytest.raises(JudgeTestKill):
            await run_to_the_end(tmp_path, server, judge=limits, steps=1)
    ((group,),) = query(tmp_path, "SELECT group_id FROM verdicts WHERE scores IS NULL")
    assert query(tmp_path, f"SELECT state FROM groups WHERE group_id = '{group}'") == [("open",)]
    await run_to_the_end(tmp_path, server, judge=limits, steps=1)
    state = f"SELECT state, reason FROM groups WHERE group_id = '{group}'"
    assert query(tmp_path, state) == [("dropped", "judge_failed")]
    assert query(tmp_path, f"SELECT count(*) FROM verdicts WHERE group_id = '{group}'") == [(1,)]
    assert holds(tmp_path)


async def test_graded_and_judged_attempts_share_no_group(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    class Mixing(JudgedWorker):
        """Says of the second attempt of a group that it is graded."""

        def show(self, lease: pb.Lease, attempt: pb.LeasedAttempt, made: Submission) -> Submission:
            mixed = lease.group_id == "g000000r0" and attempt.attempt_index == 1
            return made if mixed else super().show(lease, attempt, made)

    config = make_config(tmp_path, judge=judge_config(server), steps=1)
    assert config.judge is not None
    async with (
        asking(config.judge) as judge,
        learner(tmp_path, config, judge=judge, judged=ENVS) as running,
        Mixing(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 60)
    states = query(tmp_path, "SELECT state, reason FROM groups WHERE group_id = 'g000000r0'")
    assert states == [("dropped", "grading_changed")]
    assert query(tmp_path, "SELECT * FROM verdicts WHERE group_id = 'g000000r0'") == []


async def test_attempts_lost_with_their_environment_stay_out_of_the_verdict(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    class Losing(JudgedWorker):
        """Loses the first attempt of each group."""

        def show(self, lease: pb.Lease, attempt: pb.LeasedAttempt, made: Submission) -> Submission:
            if attempt.attempt_index:
                return super().show(lease, attempt, made)
            return failed(lease, attempt, trajectory_pb2.FAILURE_KIND_ENV_LOST)

    size = {"group_size": 3, "max_tries": 1, "min_group": 2}
    config = make_config(tmp_path, judge=judge_config(server), steps=1, **size)
    assert config.judge is not None
    async with (
        asking(config.judge) as judge,
        learner(tmp_path, config, judge=judge, judged=ENVS) as running,
        Losing(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 60)
    for body in server.asked:
        assert list(attempts_of(body)) == ["A1", "A2"]
    verdicts = query(tmp_path, "SELECT scores FROM verdicts")
    assert verdicts
    assert all(set(json.loads(scores)) == {"1", "2"} for (scores,) in verdicts)


async def test_a_worker_that_repeats_a_submission_after_the_verdict_is_told_so(
    tmp_path: Path, server: ScriptedJudge
) -> None:
    sent: list[Submission] = []

    class Keeping(JudgedWorker):
        def show(self, lease: pb.Lease, attempt: pb.LeasedAttempt, made: Submission) -> Submission:
            sent.append(super().show(lease, attempt, made))
            return sent[-1]

    config = make_config(tmp_path, judge=judge_config(server), steps=100)
    assert config.judge is not None
    async with (
        asking(config.judge) as judge,
        learner(tmp_path, config, judge=judge, judged=ENVS) as running,
        Keeping(running.address).working() as worker,
    ):
        await until(lambda: server.asked and query(tmp_path, "SELECT 1 FROM verdicts"))
        ((group,), *_) = query(tmp_path, "SELECT group_id FROM verdicts")
        repeat = next(each for each in sent if each.header.key.group_id == group)
        assert (await worker.submit(repeat)).repeated_submission
        running.task.cancel()
