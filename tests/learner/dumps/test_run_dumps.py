"""Dumps of whole runs: the content of the files, and no cost to the run."""

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from flotilla_common.episodes.episode_rows import key_of_row
from flotilla_common.run_folder import dump_files
from flotilla_common.run_folder.journal_file import open_read_only
from flotilla_common.run_folder.token_stats import read_token_stats, stats_path
from flotilla_common.run_folder.trajectory_tables import trajectory_of
from flotilla_common.text.json_lines import decode_line, encode_line
from flotilla_learner.dumps.jobs import DumpSetup
from flotilla_learner.dumps.run_dumps import MOST_WAITING, Dumps, RunDumps, dump_setup_of
from flotilla_learner.types import StepResult
from tests.learner.dumps.dumped_run import (
    STEPS,
    TellingRanks,
    dumped_run,
    read_rows,
    run_dumps,
    setup_of,
)
from tests.support.learner import FakeWorker, learner, make_config, make_runtime
from tests.support.remote_checkpoints import BUCKET, s3_server, s3_store
from tests.support.waiting import until


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that lost no dump; `folder` holds all of it, and a test that changes it copies it."""

    folder: Path
    ranks: TellingRanks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("finished")
    dumps, ranks = await dumped_run(folder, setup_of(folder))
    assert dumps.lost == 0
    assert not list(ranks.shm.iterdir())
    return FinishedRun(folder, ranks)


def test_a_run_leaves_its_episodes_and_what_its_trainer_saw(finished: FinishedRun) -> None:
    run, ranks = finished.folder / "run", finished.ranks
    for step in range(1, STEPS + 1):
        stats, tokens = read_token_stats(stats_path(run, step)), ranks.made_tokens[step]
        assert (stats.step, stats.base_version) == (step, step - 1)
        for index, each in enumerate(stats.sequences.values()):
            np.testing.assert_array_equal(each.advantages, tokens.advantages[index])
            np.testing.assert_array_equal(each.logprobs, tokens.logprobs[index])
            np.testing.assert_array_equal(each.entropy, tokens.entropy[index].astype(np.float16))
            np.testing.assert_array_equal(each.weights, tokens.corrections[index])
        batch = ranks.trained[step - 1]
        keys = [(s.group_id, s.attempt_index) for s in batch.sequences]
        assert [(key.group_id, key.attempt_index) for key, _ in stats.sequences] == keys
        rows = read_rows(run / f"rollouts/step_{step}.jsonl")
        assert sorted((row["group_id"], row["attempt_index"]) for row in rows) == sorted(keys)
    logged = [each for each in read_rows(run / "metrics.jsonl") if "eval/all/pass_at_1" in each]
    for version, record in zip((0, STEPS), logged, strict=True):
        [aggregated] = read_rows(run / f"evals/step_{version}/aggregated_results.jsonl")
        assert aggregated == {name: record[name] for name in aggregated}
        for name in ("pass_at_3", "pass_at_3_low", "avg_turns", "avg_tool_calls", "avg_score"):
            assert aggregated.keys() >= {f"eval/{env}/{name}" for env in ("all", "env0", "env2")}
        assert aggregated["eval/all/incomplete"] == 0


def test_rows_have_the_reference_fields_and_the_journal_tokens(finished: FinishedRun) -> None:
    with open_read_only(finished.folder / "run" / "journal.sqlite") as db:
        for row in read_rows(finished.folder / "run/rollouts/step_1.jsonl"):
            kept = trajectory_of(db, key_of_row(row))
            [sequence], [dumped] = kept.sequences, row["sequences"]
            assert dumped["token_ids"] == sequence.token_ids.tolist()
            np.testing.assert_allclose(dumped["logprobs"], sequence.logprobs, atol=1e-6)
            # Two tokens of the prompt come before the response.
            assert row["score"] == [0.0] * 5 + [kept.reward]
            assert (row["data_source"], row["stop_reason"]) == (row["env_key"], "done")


async def test_episodes_are_dumped_on_schedule_and_the_newest_steps_are_kept(
    tmp_path: Path,
) -> None:
    dumps, _ = await dumped_run(tmp_path, setup_of(tmp_path, every=2, keep=3), steps=5)
    run = tmp_path / "run"
    assert dumps.lost == 0
    assert dump_files.kept_steps(run) == [3, 4, 5]
    assert [path.name for path in (run / "rollouts").iterdir()] == ["step_4.jsonl"]
    pruned = read_rows(run / "token_stats/pruned.jsonl")
    assert [row["step"] for row in pruned] == [1, 2]
    assert pruned[0]["reason"] == "older than the 3 newest steps (learner.dumps.keep)"


def fill_disk(path: Path) -> None:
    """Have the kernel refuse the next write of a file: no space left on device."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f".{path.name}.tmp").symlink_to("/dev/full")


async def test_a_full_disk_costs_counted_losses_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    for path in (stats_path(run, 1), run / "rollouts/step_1.jsonl", run / "rollouts/step_2.jsonl"):
        fill_disk(path)
    caplog.set_level("INFO")
    dumps, ranks = await dumped_run(tmp_path, setup_of(tmp_path))
    assert dumps.lost == 3
    assert (run / "summary.json").exists()
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == ["step_3.jsonl"]
    assert not list(ranks.shm.iterdir())
    # By whatever has set up logging in this process.
    output = capsys.readouterr().out + caplog.text
    assert output.count("dumps are lost; the run continues without them") == 1
    assert "No space left on device" in output
    assert output.count("dumps are written again") == 1
    logged = [row for row in read_rows(run / "metrics.jsonl") if "dumps/lost" in row]
    assert len(logged) == STEPS and logged[-1]["dumps/lost"] <= 3


@pytest.mark.slow
async def test_a_dead_bucket_costs_counted_losses_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_credentials(monkeypatch)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        options = {"endpoint_url": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        setup = setup_of(tmp_path, remote="s3://nowhere/run", remote_options=options)
        dumps, _ = await dumped_run(tmp_path, setup)
    files = dumped_files(tmp_path / "run")
    assert len(files) == 2 * STEPS + 2 * 4
    assert dumps.lost == len(files)


async def test_files_are_uploaded_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_credentials(monkeypatch)
    with s3_server() as endpoint:
        setup = setup_of(
            tmp_path,
            remote=f"s3://{BUCKET}/dumped/run",
            remote_options={"endpoint_url": endpoint},
        )
        dumps, _ = await dumped_run(tmp_path, setup)
        assert dumps.lost == 0
        store = s3_store(endpoint, "dumped")
        run = tmp_path / "run"
        expected = dumped_files(run)
        assert store.list_files("dumps") == [f"dumps/{name}" for name in expected]
        for name in expected:
            assert store.read(f"dumps/{name}") == (run / name).read_bytes()


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id-for-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-for-tests")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def dumped_files(run: Path) -> list[str]:
    folders = ("evals", "rollouts", "token_stats")
    found = (path for name in folders for path in (run / name).rglob("*") if path.is_file())
    return sorted(path.relative_to(run).as_posix() for path in found)


async def test_a_resumed_run_writes_the_same_dumps_again(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    second = tmp_path / "run/rollouts/step_2.jsonl"
    config = make_config(tmp_path, steps=3)
    ranks = TellingRanks(tmp_path / "weights", shm, stuck_at=3)
    async with (
        run_dumps(tmp_path, setup_of(tmp_path)) as dumps,
        learner(tmp_path, config, ranks, dumps=dumps) as running,
        FakeWorker(running.address).working(),
    ):
        await until(second.exists)
    first, before = tmp_path / "run/rollouts/step_1.jsonl", second.read_bytes()
    numbers = read_token_stats(stats_path(tmp_path / "run", 1))
    first.unlink()
    ranks = TellingRanks(tmp_path / "weights", shm)
    async with (
        run_dumps(tmp_path, setup_of(tmp_path)) as dumps,
        learner(tmp_path, config, ranks, dumps=dumps) as running,
        FakeWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 90)
    assert first.exists()
    assert second.read_bytes() == before
    again = read_token_stats(stats_path(tmp_path / "run", 1))
    assert list(again.sequences) == list(numbers.sequences)
    for key, each in again.sequences.items():
        np.testing.assert_array_equal(each.advantages, numbers.sequences[key].advantages)
    assert dump_files.kept_steps(tmp_path / "run") == [1, 2, 3]


@asynccontextmanager
async def dumps_of_finished_run(
    finished: FinishedRun, tmp_path: Path, *, forked: bool = False
) -> AsyncGenerator[RunDumps]:
    """Yield dumps of a copy of the run, which lacks those of step 1."""
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run/rollouts/step_1.jsonl").unlink()
    async with run_dumps(tmp_path, setup_of(tmp_path), forked=forked) as dumps:
        yield dumps


def result_with(token_file: Path | None) -> StepResult:
    return StepResult({}, 0.0, skipped=False, token_file=token_file)


def writing_process() -> psutil.Process:
    [found] = [
        child
        for child in psutil.Process().children()
        # A dead engine of another test has no command line.
        if child.status() != psutil.STATUS_ZOMBIE and "flotilla_learner.dumps" in child.cmdline()
    ]
    return found


async def test_a_process_that_is_killed_loses_its_job_and_another_takes_its_place(
    finished: FinishedRun, tmp_path: Path
) -> None:
    async with dumps_of_finished_run(finished, tmp_path) as dumps:
        dumps.offer_eval("before-1-0", "before", 0, {"eval/all/pass_at_1": 0.5})
        await dumps.finish()
        assert dumps.lost == 0
        process = writing_process()
        assert process.nice() >= 10
        process.send_signal(signal.SIGSTOP)
        token_file = tmp_path / "tokens"
        token_file.touch()
        dumps.offer_step(1, result_with(token_file))
        # It has the job.
        await until(lambda: dumps.unwritten and not dumps.waiting)
        process.kill()
        dumps.offer_eval("before-1-0", "before", 0, {"eval/all/pass_at_1": 0.75})
        await dumps.finish()
        assert dumps.lost == 1
        assert not token_file.exists()
    [aggregated] = read_rows(tmp_path / "run/evals/step_0/aggregated_results.jsonl")
    assert aggregated == {"eval/all/pass_at_1": 0.75}


async def test_a_process_that_stands_still_holds_up_nothing(
    finished: FinishedRun, tmp_path: Path
) -> None:
    async with dumps_of_finished_run(finished, tmp_path) as dumps:
        dumps.offer_eval("before-1-0", "before", 0, {})
        await dumps.finish()
        process = writing_process()
        process.send_signal(signal.SIGSTOP)
        files = [tmp_path / f"tokens-{number}" for number in range(10)]
        for path in files:
            path.touch()
            dumps.offer_step(1, result_with(path))
        assert len(dumps.unwritten) == MOST_WAITING
        assert dumps.lost == len(files) - MOST_WAITING
        assert sum(path.exists() for path in files) == MOST_WAITING
        process.kill()
        process.wait()
    assert not any(path.exists() for path in files)


async def test_numbers_that_had_no_room_are_lost_and_the_episodes_are_not(
    finished: FinishedRun, tmp_path: Path
) -> None:
    async with dumps_of_finished_run(finished, tmp_path, forked=True) as dumps:
        stats_path(tmp_path / "run", 1).unlink()
        dumps.offer_step(1, result_with(None))
        await dumps.finish()
        assert dumps.lost == 1
    rows = read_rows(tmp_path / "run/rollouts/step_1.jsonl")
    assert {each["advantages"] for row in rows for each in row["sequences"]} == {None}


def test_a_run_without_dumps_removes_what_ranks_hand_out(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch()
    Dumps().offer_step(1, result_with(path))
    assert not path.exists()
    Dumps().offer_step(2, result_with(None))


def test_a_spec_sets_what_is_dumped_and_where_it_goes(tmp_path: Path) -> None:
    def setup(**dumps: object) -> DumpSetup | None:
        checkpoint = {
            "remote": "s3://bucket/prefix",
            "remote_options": {"endpoint_url": "http://x"},
        }
        config = make_config(tmp_path, dumps=dumps, checkpoint=checkpoint)
        return dump_setup_of(make_runtime(tmp_path, config, listen="127.0.0.1:0"))

    found = setup(every=3, keep=5)
    assert found is not None
    assert (found.every, found.keep, found.model) == (3, 5, "m")
    assert found.remote == "s3://bucket/prefix/run"
    assert found.remote_options == {"endpoint_url": "http://x"}
    assert decode_line(DumpSetup, encode_line(found)) == found
    local = setup(remote=False)
    assert local is not None and local.remote is None
    assert setup(enabled=False) is None
