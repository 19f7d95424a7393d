"""Whole runs that a teacher scores, with fake ranks and a real server: what is trained on is what
it said, once, whatever happens to either."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.ports import HintRenderer, TeacherRefusedError
from flotilla_learner.teacher import teacher_desk
from flotilla_learner.types import TrainBatch
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, RunningLearner, learner, make_config
from tests.support.scripted_teacher_server import (
    ScriptedTeacherServer,
    asking,
    serving_teacher,
    table_logprobs,
    write_tokenizer,
)


class TeacherTestKill(Exception):
    """Ends a run as a kill would."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[ScriptedTeacherServer]:
    async with serving_teacher(
        ScriptedTeacherServer(write_tokenizer(tmp_path / "policy"))
    ) as serving:
        yield serving


@asynccontextmanager
async def taught(
    tmp_path: Path,
    server: ScriptedTeacherServer,
    ranks: FakeRanks | None = None,
    *,
    top_k: int = 0,
    hints: HintRenderer | None = None,
    **changes: Any,
) -> AsyncGenerator[RunningLearner]:
    """A learner whose run has the teacher, and a willing worker."""
    algorithm = {"distillation": {"top_k": top_k}}
    table = {"url": server.url, **changes.pop("teacher", {})}
    config = make_config(tmp_path, teacher=table, algorithm=algorithm, **changes)
    async with (
        asking(server, tmp_path / "policy", top_k=top_k) as teacher,
        learner(tmp_path, config, ranks, teacher=teacher, hints=hints) as running,
        FakeWorker(running.address).working(),
    ):
        yield running


async def run_to_the_end(*args: Any, **changes: Any) -> None:
    async with taught(*args, **changes) as running:
        await asyncio.wait_for(running.task, 90)


def query(tmp_path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
        return db.execute(sql).fetchall()


def assert_scored(batch: TrainBatch, server: ScriptedTeacherServer) -> None:
    """Each policy token has the teacher's logprob of exactly that token there."""
    assert batch.settings.taught and batch.sequences
    for each in batch.sequences:
        assert each.teacher is not None
        places = np.flatnonzero(each.policy_mask)
        ids = each.token_ids
        expected = server.table[ids[places - 1], ids[places]].astype(np.float32)
        np.testing.assert_array_equal(each.teacher.logprobs, expected)


async def test_every_step_trains_on_what_the_teacher_said(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    ranks = FakeRanks(tmp_path / "weights")
    await run_to_the_end(tmp_path, server, ranks, top_k=2)
    assert len(ranks.trained) == 3
    for batch in ranks.trained:
        assert_scored(batch, server)
        assert all(s.teacher and s.teacher.top_ids.shape[1] == 2 for s in batch.sequences)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all("teacher/seconds" in json.loads(line) for line in lines)


class SumRenderer:
    """Renders a message as one id, by its characters. Implements `ports.HintRenderer`."""

    first_id = None

    def render_message(self, text: str) -> NDArray[np.int32]:
        return np.array([sum(map(ord, text)) % 64], np.int32)


async def test_each_attempt_is_scored_after_the_hint_of_its_own_task(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    hint = {"key": "prompt", "message": "psst: {hint}"}
    ranks, renderer = FakeRanks(tmp_path / "weights"), SumRenderer()
    await run_to_the_end(tmp_path, server, ranks, teacher={"hint": hint}, hints=renderer)
    tasks = query(tmp_path, "SELECT group_id, spec FROM groups")
    texts = {group: json.loads(json.loads(spec)["task"][2])["prompt"] for group, spec in tasks}
    asked = [body["prompt"] for body in server.asked]
    for batch in ranks.trained:
        assert_scored(batch, server)
        for each in batch.sequences:
            before = renderer.render_message(f"psst: {texts[each.group_id]}").tolist()
            end = int(np.flatnonzero(each.policy_mask)[-1]) + 1
            assert [*before, *each.token_ids[:end].tolist()] in asked


async def test_a_killed_step_is_trained_again_on_the_journaled_numbers(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    """Though the teacher would say something else by now: a replay does not ask it."""

    def kill(name: str) -> None:
        if name == "trained" and len(first.trained) == 1:
            raise TeacherTestKill

    first = FakeRanks(tmp_path / "weights", before=kill)
    with pytest.raises(TeacherTestKill):
        await run_to_the_end(tmp_path, server, first)
    (killed,) = first.trained
    asked = len(server.asked)
    server.table = table_logprobs(seed=1)
    second = FakeRanks(tmp_path / "weights")
    await run_to_the_end(tmp_path, server, second, steps=1)
    (again,) = second.trained
    np.testing.assert_array_equal(first.parameters, second.parameters)
    for one, other in zip(killed.sequences, again.sequences, strict=True):
        assert one.teacher and other.teacher
        np.testing.assert_array_equal(one.teacher.logprobs, other.teacher.logprobs)
    # Only the question by which the start proves the teacher.
    assert len(server.asked) == asked + 1


async def test_scores_that_are_damaged_end_the_replay_and_are_never_trained_on(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    def kill(name: str) -> None:
        if name == "train":
            raise TeacherTestKill

    with pytest.raises(TeacherTestKill):
        await run_to_the_end(tmp_path, server, FakeRanks(tmp_path / "weights", before=kill))
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
        (payload,) = db.execute("SELECT payload FROM teacher_scores").fetchone()
        spoiled = payload[:-1] + bytes([payload[-1] ^ 1])
        db.execute("UPDATE teacher_scores SET payload = ? WHERE payload = ?", (spoiled, payload))
        db.commit()
    ranks = FakeRanks(tmp_path / "weights")
    with pytest.raises(ConfigError, match=r"teacher's scores of .* are damaged"):
        await run_to_the_end(tmp_path, server, ranks)
    assert not ranks.trained


async def test_a_drain_ends_the_wait_and_the_next_start_asks_again(
    tmp_path: Path, server: ScriptedTeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(choice: dict[str, Any]) -> web.Response:
        waiting.set()
        return web.Response(status=503)

    async def prove(choice: dict[str, Any]) -> None:
        return None

    waiting = asyncio.Event()
    monkeypatch.setattr(teacher_desk, "_FIRST_PAUSE_S", 0.01)
    server.faults.extend([prove, *[fail] * 10_000])
    async with taught(tmp_path, server, teacher={"patience_s": 0.05}) as running:
        await asyncio.wait_for(waiting.wait(), 30)
        await asyncio.sleep(0.3)
        assert "teacher_down" in (tmp_path / "run" / "alarms.jsonl").read_text()
        running.runtime.drain.set()
        await asyncio.wait_for(running.task, 20)
    assert query(tmp_path, "SELECT * FROM plans") == []
    server.faults.clear()
    ranks = FakeRanks(tmp_path / "weights")
    await run_to_the_end(tmp_path, server, ranks)
    assert [batch.step for batch in ranks.trained] == [1, 2, 3]
    for batch in ranks.trained:
        assert_scored(batch, server)


async def test_a_drain_ends_the_wait_for_a_teacher_that_never_starts(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    async def fail(choice: dict[str, Any]) -> web.Response:
        waiting.set()
        return web.Response(status=503)

    waiting = asyncio.Event()
    server.faults.extend([fail] * 1000)
    async with taught(tmp_path, server) as running:
        await asyncio.wait_for(waiting.wait(), 30)
        running.runtime.drain.set()
        await asyncio.wait_for(running.task, 20)


async def test_a_teacher_of_another_vocabulary_ends_the_run_before_it_samples(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    server.folder = write_tokenizer(tmp_path / "other", first=1)
    with pytest.raises(TeacherRefusedError, match="same family"):
        await run_to_the_end(tmp_path, server)
    assert query(tmp_path, "SELECT * FROM plans") == []


async def test_scores_are_pruned_with_the_attempts_that_they_are_of(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    await run_to_the_end(
        tmp_path, server, steps=6, checkpoint={"every": 1, "keep": 1}, max_staleness=0
    )
    kept = query(tmp_path, "SELECT DISTINCT group_id FROM teacher_scores ORDER BY 1")
    whole = query(
        tmp_path,
        "SELECT DISTINCT t.group_id FROM trajectories t JOIN groups g USING (group_id)"
        " WHERE t.payload IS NOT NULL AND g.state = 'planned' ORDER BY 1",
    )
    assert kept == whole and len(kept) < 6 * 3


async def test_a_run_goes_on_without_the_teacher_it_had(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    await run_to_the_end(tmp_path, server, steps=1)
    ranks = FakeRanks(tmp_path / "weights")
    config = make_config(tmp_path, steps=2)
    async with (
        learner(tmp_path, config, ranks) as running,
        FakeWorker(running.address).working(),
    ):
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(running.task, 60)
    (batch,) = ranks.trained
    assert not batch.settings.taught
    assert all(sequence.teacher is None for sequence in batch.sequences)


async def test_attempts_are_scored_while_the_step_before_theirs_trains(
    tmp_path: Path, server: ScriptedTeacherServer
) -> None:
    asked: dict[str, list[int]] = {"train": [], "trained": []}

    def note(name: str) -> None:
        if name in asked:
            asked[name].append(len(server.asked))

    ranks = FakeRanks(tmp_path / "weights", train_s=1.5, before=note)
    await run_to_the_end(tmp_path, server, ranks)
    for batch in ranks.trained:
        assert_scored(batch, server)
    during = [after - before for before, after in zip(*asked.values(), strict=True)]
    assert sum(during) > 0
