"""Demonstrations of a run: exact ids and masks, from its journal and its dumps."""

import json
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author, Span, policy_mask
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.domain.trajectory import (
    SequenceCause,
    SequenceOrigin,
    Trajectory,
    content_digest,
)
from flotilla_common.episodes.demonstrations import DemonstrationFile, read_demonstrations
from flotilla_common.run_folder.dump_files import rollouts_path
from flotilla_common.run_folder.journal_file import BEGAN_WITH
from flotilla_reading.demonstrations import __main__ as command
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.demonstrations.run_episodes import (
    NoDemonstrationsError,
    explain,
    make_demonstrations,
)
from tests.reading.inspector.made_runs import MadeAttempt, MadeRun, conversation, open_run

DIGEST = "ab" * 32


async def made_run(tmp_path: Path) -> MadeRun:
    """Two steps of two groups of two attempts each, of which every first one passes, and one
    evaluation."""
    run = open_run(tmp_path / "runs")
    await run.journal.begin_epoch(1)
    await run.journal.set_meta({BEGAN_WITH: {"tokenizer": DIGEST}})
    for step in (1, 2):
        attempts = [
            MadeAttempt(conversation(3), 1.0),
            MadeAttempt(conversation(2, answer="lost"), 0.0),
        ]
        groups = [await run.add_group(attempts) for _ in range(2)]
        await run.plan_step(step, groups)
    await run.add_group([MadeAttempt(conversation(), 1.0)], eval_id="during-1-2")
    return run


async def prune(run: MadeRun, *groups: str) -> None:
    marks = ", ".join("?" * len(groups))
    sql = f"UPDATE trajectories SET payload = NULL WHERE group_id IN ({marks})"
    await run.journal.run_transaction(lambda db: db.execute(sql, groups))


def made(run: MadeRun, rules: AcceptanceRules | None = None) -> DemonstrationFile:
    out = run.folder / "out.npz"
    make_demonstrations(run.folder, out, rules or AcceptanceRules())
    return read_demonstrations(out)


async def test_a_journal_gives_exactly_the_ids_that_were_sampled_and_who_wrote_them(
    tmp_path: Path,
) -> None:
    run = await made_run(tmp_path)
    seen: list[tuple[int, int]] = []
    head = make_demonstrations(
        *(run.folder, tmp_path / "out.npz", AcceptanceRules()),
        lambda done, total: seen.append((done, total)),
    )
    await run.journal.close()
    found = read_demonstrations(tmp_path / "out.npz")
    assert found.head == head
    assert (head.source, head.tokenizer) == (run.folder.name, DIGEST)
    assert seen == [(n, 4) for n in range(1, 5)]
    assert [each.key.group_id for each in found.sequences] == [f"g{n:06d}r0" for n in range(4)]
    for each in found.sequences:
        [sequence] = run.trajectories[each.key].sequences
        np.testing.assert_array_equal(each.token_ids, sequence.token_ids)
        np.testing.assert_array_equal(each.trained, policy_mask(sequence.spans))
        assert each.trained.sum() == len(sequence.logprobs)
        assert each.task_key == f"booking-{int(each.key.group_id[1:7]):03d}"
    assert head.counts["trained_tokens"] == sum(int(s.trained.sum()) for s in found.sequences)
    assert (head.counts["evaluated"], head.counts["below_min_reward"]) == (1, 4)


async def test_what_the_journal_pruned_comes_from_its_dump_token_by_token(tmp_path: Path) -> None:
    run = await made_run(tmp_path)
    before = made(run)
    key = AttemptKey("g000000r0", 0, 0)
    [sequence] = run.trajectories[key].sequences
    spans = [[span.author, span.length, None, span.temperature] for span in sequence.spans]
    numbers = {"token_ids": sequence.token_ids.tolist(), "logprobs": sequence.logprobs.tolist()}
    row = {
        **{"group_id": key.group_id, "attempt_index": 0, "attempt_try": 0},
        "sequences": [{**numbers, "spans": spans, "pictures": []}],
    }
    rollouts_path(run.folder, 1).parent.mkdir()
    rollouts_path(run.folder, 1).write_text(json.dumps(row) + "\n")
    await prune(run, "g000000r0")
    after = made(run)
    await run.journal.close()
    assert after.sha256 == before.sha256


async def test_what_is_in_neither_is_counted_and_named(tmp_path: Path) -> None:
    run = await made_run(tmp_path)
    await prune(run, "g000000r0", "g000002r0")
    found = made(run)
    await run.journal.close()
    assert found.head.pruned == ("g000000r0/0/0", "g000002r0/0/0")
    assert (found.head.counts["accepted"], found.head.counts["pruned"]) == (4, 2)
    assert len(found.sequences) == 2
    assert "left out: 2 whose tokens were pruned (learner.journal.keep_payloads" in explain(
        found.head
    )


async def test_a_sequence_that_continues_another_trains_only_its_own_tokens(
    tmp_path: Path,
) -> None:
    run = await made_run(tmp_path)
    group = await run.add_group([], size=1)
    spans = (Span(Author.PROMPT, 3), Span(Author.POLICY, 4), Span(Author.ENVIRONMENT, 2))
    first = TokenSequence(np.arange(9, dtype=np.int32), spans, np.zeros(4, np.float32))
    # It shares the first seven tokens, of which the policy wrote four.
    own = (Span(Author.PROMPT, 8), Span(Author.POLICY, 3))
    ids = np.concatenate([first.token_ids[:7], np.array([50, 51, 52, 53], np.int32)])
    origin = SequenceOrigin(SequenceCause.BRANCH, parent=0, shared=7)
    second = TokenSequence(ids, own, np.zeros(3, np.float32), origin=origin)
    sequences = (first, second)
    key, digest = AttemptKey(group, 0, 0), content_digest(sequences)
    await run.journal.add_trajectory(Trajectory(key, "lease-5", sequences, digest, reward=1.0))
    found = made(run)
    await run.journal.close()
    one, other = (each for each in found.sequences if each.key == key)
    assert other.token_ids.tolist() == [*range(7), 50, 51, 52, 53]
    assert np.flatnonzero(one.trained).tolist() == [3, 4, 5, 6]
    assert np.flatnonzero(other.trained).tolist() == [8, 9, 10]
    assert found.head.counts["continued_sequences"] == 1


async def test_an_episode_without_a_token_of_the_policy_is_counted_and_not_written(
    tmp_path: Path,
) -> None:
    run = await made_run(tmp_path)
    await run.add_group([MadeAttempt([(Author.PROMPT, "Book a hotel in Rome.")], 1.0)])
    found = made(run)
    await run.journal.close()
    assert found.head.counts["without_trained_tokens"] == 1
    assert len(found.sequences) == 4


async def test_a_run_without_anything_to_imitate_says_what_became_of_its_episodes(
    tmp_path: Path,
) -> None:
    run = await made_run(tmp_path)
    with pytest.raises(NoDemonstrationsError, match=r"8 below reward 2\.0"):
        made(run, AcceptanceRules(min_reward=2.0))
    assert not (run.folder / "out.npz").exists()
    await run.journal.set_meta({BEGAN_WITH: {}})
    with pytest.raises(NoDemonstrationsError, match="names no tokenizer"):
        made(run)
    await run.journal.close()


async def test_the_command_writes_the_file_and_prints_what_it_says_of_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await made_run(tmp_path)
    await run.journal.close()
    out = tmp_path / "out.npz"
    words = [str(run.folder), "--out", str(out), "--best-of", "2", "--min-reward", "0.5"]
    assert command.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["selection"] == {"min_reward": 0.5, "best_of": 2}
    assert said["counts"] == dict(read_demonstrations(out).head.counts)
    assert said["counts"]["not_best"] == 4
    assert command.main([str(tmp_path / "none"), "--out", str(out)]) == 1
    assert "does not exist, so no episode is known" in capsys.readouterr().err
