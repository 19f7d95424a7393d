"""One command trains a policy: every part real, two optimizer steps, then everything is checked."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.adapters.token_text import load_decoder
from flotilla_common.domain.attempts import FailureKind
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_common.episodes.episode_rows import key_of_row
from flotilla_common.run_folder.token_stats import read_token_stats, stats_path
from flotilla_common.weights.shared_memory import SHARED_MEMORY
from tests.e2e.finished_run import (
    EVAL_TASKS,
    GROUPS,
    FinishedRun,
    Scorer,
    distances,
    processes_of,
    train,
    write_spec,
)

pytestmark = [
    pytest.mark.engine,
    # Four of these processes share two cores, and the first test may build the policy.
    pytest.mark.timeout(580),
    # What transformers and torch warn about is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

STEPS = 2
ATTEMPTS = 8 * GROUPS
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def finished(quick_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("training")
    spec = write_spec(folder, quick_policy, steps=STEPS)
    run = train(spec, folder / "runs", timeout_s=500)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture(scope="module")
def scorers(finished: FinishedRun, quick_policy: Path) -> list[Scorer]:
    """Return scorers by version: what was trained from, and the checkpoint of each step."""
    saved = [finished.export_step(step, quick_policy) for step in range(1, STEPS + 1)]
    return [Scorer(folder) for folder in (quick_policy, *saved)]


def test_two_steps_are_committed(finished: FinishedRun) -> None:
    assert finished.rows("SELECT step FROM plans ORDER BY step") == [(1,), (2,)]
    assert finished.rows("SELECT step FROM checkpoints ORDER BY step") == [(1,), (2,)]
    trained = finished.metrics("policy/loss")
    assert [record["step"] for record in trained] == [1, 2]
    assert all(record["policy/skipped"] == 0 for record in trained)
    assert all(record["policy/grad_norm"] > 0 for record in trained), "nothing was learnt from"


def test_each_step_trains_on_what_the_step_before_published(finished: FinishedRun) -> None:
    published = dict(finished.rows("SELECT version, fingerprint FROM publications"))
    assert len(set(published.values())) == STEPS + 1, "weights stayed the same"
    for step in range(1, STEPS + 1):
        attempts = finished.trajectories(f"step = {step}")
        policies = {policy for attempt in attempts for policy in attempt.policies}
        assert {policy.version for policy in policies} == {step - 1}
        assert {policy.fingerprint for policy in policies} == {published[step - 1]}
    last = {
        policy.version
        for attempt in finished.trajectories("eval_id LIKE 'after-%'")
        for policy in attempt.policies
    }
    assert last == {STEPS}


def written_by(finished: FinishedRun, scorer: Scorer, version: int) -> NDArray[np.float32]:
    """Engine's minus trainer's logprobs at all tokens that a version wrote and that are kept."""
    attempts = [a for a in finished.trajectories() if a.failure is None]
    parts = [distances(s, scorer, version) for a in attempts for s in a.sequences]
    return np.concatenate(parts)


def test_the_engines_logprobs_after_every_sync_are_the_trainers(
    finished: FinishedRun, scorers: list[Scorer]
) -> None:
    for version, scorer in enumerate(scorers):
        found = np.abs(written_by(finished, scorer, version))
        assert len(found) > 300, f"too few tokens of version {version} are kept"
        assert found.max() < TOLERANCE, f"version {version}"


def test_a_policy_one_sync_behind_would_have_been_noticed(
    finished: FinishedRun, scorers: list[Scorer]
) -> None:
    for version in range(1, STEPS + 1):
        stale = np.abs(written_by(finished, scorers[version - 1], version))
        assert stale.max() > 10 * TOLERANCE, f"version {version}"


def test_every_acknowledged_trajectory_is_accounted_for(finished: FinishedRun) -> None:
    plans = [json.loads(text) for (text,) in finished.rows("SELECT attempts FROM plans")]
    trained = [tuple(key) for plan in plans for key in plan]
    assert len(trained) == len(set(trained)), "an attempt was trained twice"
    kept = "SELECT group_id, attempt_index, try FROM trajectories JOIN groups USING (group_id)"
    evaluated = finished.rows(f"{kept} WHERE purpose = 'eval' AND state = 'evaluated'")
    failed = finished.rows(f"{kept} WHERE failure IS NOT NULL")
    dropped = finished.rows(f"{kept} WHERE dropped != '' OR state IN ('dropped', 'filtered')")
    queued = finished.rows(f"{kept} WHERE purpose = 'train' AND state = 'open'")
    fates = [set(each) for each in (trained, evaluated, failed, dropped, queued)]
    acknowledged = set(finished.rows(kept))
    assert set[tuple[object, ...]]().union(*fates) == acknowledged
    assert finished.summary["trajectories"]["acknowledged"] == len(acknowledged)
    # Nothing failed here, so that every attempt has one try and one fate.
    failures = [t.detail for t in finished.trajectories() if isinstance(t.failure, FailureKind)]
    assert failures == []
    assert [len(fate) for fate in fates] == [STEPS * ATTEMPTS, 2 * 3 * EVAL_TASKS, 0, 0, 0]


def test_the_learner_refuses_nothing_that_the_rollouts_made(finished: FinishedRun) -> None:
    """Neither an alarm nor a failed try: a refusal is a bug of one of the two."""
    logs = "".join(file.read_text() for file in finished.runs.rglob("rollout-*.log"))
    assert logs and "submission refused" not in logs
    assert FailureKind.REFUSED_BY_LEARNER not in logs


def test_nothing_is_left_running_or_in_shared_memory(finished: FinishedRun) -> None:
    assert processes_of(finished.runs) == []
    assert list(SHARED_MEMORY.glob(f"*{finished.folder.name}*")) == []
    assert finished.rows("SELECT * FROM instances", "env_gateway-0.sqlite") == []


def test_the_summary_has_the_promised_fields(finished: FinishedRun) -> None:
    summary = finished.summary
    assert set(summary) == {"eval", "run_id", "seconds", "steps", "seed", "trajectories"}
    assert set(summary["seconds"]) == {"to_first_step", "train", "total"}
    assert (summary["steps"], summary["seed"]) == (STEPS, 0)
    assert set(summary["eval"]) == {"before", "after"}
    promised = {"pass_at_1", "ci95", "greedy_pass_at_1", "by_env", "unseen_names"}
    for figures in summary["eval"].values():
        assert set(figures) == promised | {"tasks", "missing"}
        assert (figures["tasks"], figures["missing"]) == (EVAL_TASKS, 0)
        low, high = figures["ci95"]
        assert 0 <= low <= figures["pass_at_1"] <= high <= 1
        shares = [figures["greedy_pass_at_1"], figures["unseen_names"], *figures["by_env"].values()]
        assert all(0 <= share <= 1 for share in shares)
        assert set(figures["by_env"]) == {"booking", "tracker", "shop"}
    seconds = summary["seconds"]
    assert 0 < seconds["to_first_step"] < seconds["total"]
    assert 0 < seconds["train"] < seconds["total"]


def dumped(finished: FinishedRun, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (finished.folder / name).read_text().splitlines()]


def test_every_episode_of_a_step_is_dumped_in_the_reference_fields(
    finished: FinishedRun, quick_policy: Path
) -> None:
    decode = load_decoder(str(quick_policy))
    for step in range(1, STEPS + 1):
        kept = {each.key: each for each in finished.trajectories(f"step = {step}")}
        rows = dumped(finished, f"rollouts/step_{step}.jsonl")
        assert {key_of_row(row) for row in rows} == set(kept)
        for row in rows:
            trajectory = kept[key_of_row(row)]
            [sequence] = trajectory.sequences
            assert row["input_prompt"] + row["output_response"] == decode(
                sequence.token_ids.tolist()
            )
            prompt = sequence.spans[0].length
            assert len(row["score"]) == len(sequence.token_ids) - prompt
            assert (sum(row["score"]), row["score"][-1]) == (trajectory.reward,) * 2
            assert row["stop_reason"] == trajectory.stop_reason
            assert row["data_source"] == trajectory.facts.env_key
            assert row["env_extras"]["task_key"] == trajectory.facts.task_key
            called = [call for each in row["messages"] for call in each.get("tool_calls", ())]
            assert len(called) >= trajectory.counts.tool_calls
            assert all(isinstance(call["function"]["arguments"], dict) for call in called)
            roles = [each["role"] for each in row["messages"]]
            # A turn of several calls is answered together.
            answers = sum(pair[1] == "tool" != pair[0] for pair in pairwise(roles))
            # Answers to the last turn may have come when there was nobody to read them.
            unread = roles[-1] == "tool" and sequence.spans[-1].author is not Author.ENVIRONMENT
            assert answers - unread == sum(s.author is Author.ENVIRONMENT for s in sequence.spans)


def test_token_stats_are_the_trainers_numbers(finished: FinishedRun, scorers: list[Scorer]) -> None:
    for step in range(1, STEPS + 1):
        stats = read_token_stats(stats_path(finished.folder, step))
        kept = {each.key: each for each in finished.trajectories(f"step = {step}")}
        rewards = {key: each.reward for key, each in kept.items()}
        assert any(each.trained for each in stats.sequences.values())
        for (key, index), each in stats.sequences.items():
            group = [r for other, r in rewards.items() if other.group_id == key.group_id]
            signal = len(set(group)) > 1
            assert (each.trained, each.advantages.any()) == (signal, signal)
            if not signal:
                assert each.why_not == "no signal" and np.isnan(each.logprobs).all()
                continue
            sequence = kept[key].sequences[index]
            [temperature] = {s.temperature for s in sequence.spans if s.temperature is not None}
            places = np.flatnonzero(policy_mask(sequence.spans))
            expected = scorers[step - 1].logprobs(sequence.token_ids, places, temperature)
            np.testing.assert_allclose(each.logprobs, expected, atol=1e-4)


def test_what_is_dumped_of_an_evaluation_is_what_was_logged(finished: FinishedRun) -> None:
    for version in (0, STEPS):
        [results] = dumped(finished, f"evals/step_{version}/aggregated_results.jsonl")
        [logged] = [r for r in finished.metrics("eval/all/pass_at_1") if r["step"] == version]
        assert results == {name: value for name, value in logged.items() if name in results}
        assert results.keys() >= {name for name in logged if name.startswith("eval")}
        folder = finished.folder / f"evals/step_{version}"
        rows = [
            row
            for path in folder.glob("*.jsonl")
            if path.name != "aggregated_results.jsonl"
            for row in dumped(finished, str(path.relative_to(finished.folder)))
        ]
        main = [row["reward"] for row in rows if "-heldout-" in row["group_id"]]
        assert np.mean([reward >= 1 for reward in main]) == results["eval/all/pass_at_1"]


def test_a_run_loses_no_dump(finished: FinishedRun) -> None:
    assert all(record["dumps/lost"] == 0 for record in finished.metrics("dumps/lost"))
    assert [*(finished.folder / "logs").glob("learner-dumps.log")]
    logs = "".join(path.read_text() for path in (finished.folder / "logs").glob("learner*.log"))
    assert "dumps are lost" not in logs and "Traceback" not in logs
