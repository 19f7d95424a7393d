"""Dumps of a run that imitates: what each step imitated, and the numbers of its tokens."""

from pathlib import Path

import numpy as np

from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.episodes.episode_rows import sequence_of_row
from flotilla_common.episodes.imitated_attempts import imitated_key
from flotilla_common.run_folder.dump_files import kept_steps, rollouts_path
from flotilla_common.run_folder.token_stats import read_token_stats, stats_path
from flotilla_learner.dumps.dump_writer import DumpWriter
from flotilla_learner.dumps.jobs import ImitationJob
from flotilla_learner.imitation.step_schedule import StepSchedule
from tests.learner.dumps.dumped_run import (
    IMITATED,
    PER_STEP,
    STEPS,
    imitated_run,
    read_rows,
    setup_of,
)
from tests.support.demonstrations import make_demonstrations, write_file


async def test_a_dump_holds_what_a_step_imitated_and_the_numbers_of_each_token(
    tmp_path: Path,
) -> None:
    dumps, ranks = await imitated_run(tmp_path, setup_of(tmp_path))
    assert dumps.lost == 0
    given, schedule = make_demonstrations(IMITATED), StepSchedule(IMITATED, PER_STEP, 0)
    for step in range(1, STEPS + 1):
        rows = read_rows(rollouts_path(tmp_path / "run", step))
        stats = read_token_stats(stats_path(tmp_path / "run", step))
        assert stats.base_version == step - 1
        made = ranks.made_tokens[step]
        for number, place in enumerate(schedule.places_of(step)):
            row, wanted = rows[number], given[place]
            sequence = sequence_of_row(row["sequences"][0])
            np.testing.assert_array_equal(sequence.token_ids, wanted.token_ids)
            np.testing.assert_array_equal(policy_mask(sequence.spans), wanted.trained)
            assert np.isnan(sequence.logprobs).all()
            assert row["task_key"] == wanted.task_key and row["purpose"] == "imitation"
            key = wanted.key
            assert row["detail"] == f"imitates run/{key.group_id}/{key.attempt_index}/0"
            own = stats.sequences[imitated_key(step, number), 0]
            np.testing.assert_array_equal(own.logprobs, made.logprobs[number])
    assert not list((tmp_path / "shm").iterdir())


async def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    await imitated_run(tmp_path, setup_of(tmp_path, keep=2))
    assert kept_steps(tmp_path / "run") == [STEPS - 1, STEPS]


def test_another_file_than_the_run_imitates_is_not_dumped(tmp_path: Path) -> None:
    file = write_file(tmp_path / "other.npz", make_demonstrations(3, seed=1))
    writer = DumpWriter(setup_of(tmp_path), str, lambda _: None)
    for data, sha256, why in [
        (str(file), "0" * 64, "another file than the run imitates"),
        (str(tmp_path / "missing.npz"), "0" * 64, "does not exist"),
    ]:
        report = writer.do_job(ImitationJob(1, None, data, sha256, (0,), 8))
        assert report.size_bytes == 0
        assert why in report.lost["imitation step 1"]
    assert not rollouts_path(tmp_path / "run", 1).exists()
