"""What a run imitates: read from a file, fitted to the model, held out by task."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.config.imitation import SftConfig
from flotilla_learner.config.learner import EvalSetConfig
from flotilla_learner.imitation.demonstration_set import (
    DemonstrationSet,
    load_demonstrations,
    make_batch,
    refuse_imitated_tasks,
)
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.sampling.tasks import Task
from tests.support.demonstrations import make_demonstrations, write_file
from tests.support.learner import TOKENIZER


def load(path: Path, *, longest: int = 128, seed: int = 0, **changes: Any) -> DemonstrationSet:
    values = {"data": str(path), "sequences_per_step": 2, **changes}
    policy = {"model": "m", "max_model_len": longest}
    shared = parse_config(SharedConfig, {"name": "t", "seed": seed, "policy": policy}, where="test")
    config = parse_config(SftConfig, values, where="test")
    return load_demonstrations(config, shared, TokenizerDigests(TOKENIZER))


def test_a_batch_has_the_files_ids_and_masks_and_is_marked_as_imitated(tmp_path: Path) -> None:
    given = make_demonstrations(6)
    found = load(write_file(tmp_path / "file.npz", given))
    batch = make_batch(3, found.trained)
    assert (batch.step, batch.imitated, found.heldout) == (3, True, ())
    for sequence, was in zip(batch.sequences, given, strict=True):
        np.testing.assert_array_equal(sequence.token_ids, was.token_ids)
        np.testing.assert_array_equal(sequence.policy_mask, was.trained)
        assert (sequence.temperature, sequence.staleness) == (1.0, 0)
        assert sequence.group_id == f"run/{was.key.group_id}"


def test_ids_of_another_tokenizer_are_refused_with_both_digests(tmp_path: Path) -> None:
    path = write_file(tmp_path / "file.npz", make_demonstrations(6), b"u" * 32)
    with pytest.raises(ConfigError, match="another tokenizer or chat template") as caught:
        load(path)
    assert (b"u" * 6).hex() in str(caught.value) and (b"t" * 6).hex() in str(caught.value)


def test_ids_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    found = load(write_file(tmp_path / "file.npz", make_demonstrations(6, vocabulary=64)))
    largest = max(int(each.token_ids.max()) for each in found.trained)
    found.check_vocabulary(largest + 1)
    with pytest.raises(ConfigError, match=f"has token id {largest}, but"):
        found.check_vocabulary(largest)


def test_too_long_sequences_are_dropped_or_cut_as_the_spec_says(tmp_path: Path) -> None:
    given = make_demonstrations(40)
    path = write_file(tmp_path / "file.npz", given)
    fitting = [each for each in given if len(each.token_ids) <= 12]
    assert 2 < len(fitting) < 40
    dropped = load(path, longest=12, too_long="drop")
    assert [each.key for each in dropped.trained] == [each.key for each in fitting]
    cut = load(path, longest=12, too_long="cut")
    assert [each.key for each in cut.trained] == [each.key for each in given]
    for each, was in zip(cut.trained, given, strict=True):
        np.testing.assert_array_equal(each.token_ids, was.token_ids[:12])
        np.testing.assert_array_equal(each.trained, was.trained[:12])


def test_a_sequence_of_which_a_cut_leaves_nothing_to_train_is_left_out(tmp_path: Path) -> None:
    late = make_demonstrations(4)
    none = late[0].trained.copy()
    none[:7] = False
    given = [replace(late[0], trained=none), *late[1:]]
    found = load(write_file(tmp_path / "file.npz", given), longest=7, too_long="cut")
    assert [each.key for each in found.trained] == [each.key for each in given[1:]]


def test_held_out_are_whole_tasks_with_at_least_the_share_of_episodes(tmp_path: Path) -> None:
    path = write_file(tmp_path / "file.npz", make_demonstrations(40, tasks=10))
    found = load(path, heldout=0.25)
    tasks = [{each.task_key for each in part} for part in (found.trained, found.heldout)]
    assert not tasks[0] & tasks[1] and len(tasks[0] | tasks[1]) == 10
    # Tasks have 4 episodes each.
    assert len(found.heldout) == 12 and len(found.trained) == 28
    assert load(path, heldout=0.25).heldout[0].key == found.heldout[0].key
    others = load(path, heldout=0.25, seed=1)
    assert {each.task_key for each in others.heldout} != tasks[1]


def test_one_task_is_always_left_to_train_on(tmp_path: Path) -> None:
    found = load(write_file(tmp_path / "file.npz", make_demonstrations(40, tasks=2)), heldout=0.99)
    assert len(found.trained) == len(found.heldout) == 20
    one = write_file(tmp_path / "one.npz", make_demonstrations(40, tasks=1))
    with pytest.raises(ConfigError, match=r"learner\.sft\.heldout: .* all of one task"):
        load(one, heldout=0.1)


def test_a_step_of_more_sequences_than_there_are_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "file.npz", make_demonstrations(6))
    with pytest.raises(ConfigError, match=r"sequences_per_step: 7, but .* only 6 sequences"):
        load(path, sequences_per_step=7)


def test_a_missing_file_names_the_key_and_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.sft\.data: .*flotilla sft SPEC --from RUN"):
        load(tmp_path / "none.npz")


def test_an_evaluation_of_tasks_that_are_imitated_is_refused() -> None:
    config = EvalSetConfig(name="heldout", tasks="tasks.json")
    apart = EvalSet(config, (Task("other", "env", "{}"),))
    refuse_imitated_tasks(make_demonstrations(4), [apart])
    shared = EvalSet(config, (Task("other", "env", "{}"), Task("task-1", "env", "{}")))
    with pytest.raises(ConfigError, match=r"1 of the 2 tasks .* 'task-1' first"):
        refuse_imitated_tasks(make_demonstrations(4), [shared])
