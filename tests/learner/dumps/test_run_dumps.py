"""Dumps of whole runs: what is in the files, and that no dump costs a run anything."""

from pathlib import Path

import numpy as np

from services.learner.dumps.episode_rows import key_of_row
from services.learner.dumps.token_stats import read_token_stats, stats_path
from services.learner.journal.store import open_read_only
from services.learner.journal.trajectory_tables import trajectory_of
from tests.learner.dumps.dumped_run import STEPS, dumped_run, read_rows, setup_of


async def test_a_run_leaves_its_episodes_and_what_its_trainer_saw(
    tmp_path: Path,
) -> None:
    dumps, ranks = await dumped_run(tmp_path, setup_of(tmp_path))
    run = tmp_path / "run"
    assert dumps.lost == 0
    assert not list(ranks.shm.iterdir())
    for step in range(1, STEPS + 1):
        stats, told = read_token_stats(stats_path(run, step)), ranks.told[step]
        assert (stats.step, stats.base_version) == (step, step - 1)
        for index, each in enumerate(stats.sequences.values()):
            np.testing.assert_array_equal(each.advantages, told.advantages[index])
            np.testing.assert_array_equal(each.logprobs, told.logprobs[index])
            np.testing.assert_array_equal(each.entropy, told.entropy[index].astype(np.float16))
        batch = ranks.trained[step - 1]
        keys = [(s.group_id, s.attempt_index) for s in batch.sequences]
        assert [(key.group_id, key.attempt_index) for key, _ in stats.sequences] == keys
        rows = read_rows(run / f"rollouts/step_{step}.jsonl")
        assert sorted((row["group_id"], row["attempt_index"]) for row in rows) == sorted(keys)
    logged = [each for each in read_rows(run / "metrics.jsonl") if "eval/all/pass_at_1" in each]
    for version, record in zip((0, STEPS), logged, strict=True):
        [aggregated] = read_rows(run / f"evals/step_{version}/aggregated_results.jsonl")
        assert aggregated == {name: record[name] for name in aggregated}
        assert aggregated["eval/all/pass_at_1"] >= 0


async def test_rows_have_the_reference_fields_and_the_journal_tokens(
    tmp_path: Path,
) -> None:
    await dumped_run(tmp_path, setup_of(tmp_path), steps=1)
    with open_read_only(tmp_path / "run" / "journal.sqlite") as db:
        for row in read_rows(tmp_path / "run/rollouts/step_1.jsonl"):
            kept = trajectory_of(db, key_of_row(row))
            [sequence], [dumped] = kept.sequences, row["sequences"]
            assert dumped["token_ids"] == sequence.token_ids.tolist()
            np.testing.assert_allclose(dumped["logprobs"], sequence.logprobs, atol=1e-6)
            # Two tokens of the prompt come before the response.
            assert row["score"] == [0.0] * 5 + [kept.reward]
            assert (row["data_source"], row["stop_reason"]) == (row["env_key"], "done")
