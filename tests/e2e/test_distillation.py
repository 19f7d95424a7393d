"""A run that learns from a teacher alone, by real processes and two real vLLM engines: a policy
that noise has spoiled comes back to the one that it was."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.run_folder.journal_file import open_read_only
from flotilla_learner.journal.teacher_tables import scores_of
from tests.e2e.finished_run import FinishedRun, Scorer, train, write_spec
from tests.support.tiny_model import perturbed
from tests.support.vllm_server_process import serving_vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(560)]

STEPS = 8
TOLERANCE = 1e-4


class Distilled(NamedTuple):
    run: FinishedRun
    teacher: Path


def spoil(policy: Path, folder: Path) -> Path:
    """The same architecture and tokenizer, its weights with noise."""
    shutil.copytree(policy, folder)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    perturbed(model, seed=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def distilled(quick_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    folder = tmp_path_factory.mktemp("distilled")
    student = spoil(quick_policy, folder / "student")
    spec = write_spec(folder, student, steps=STEPS)
    with serving_vllm(quick_policy, folder / "teacher.log", "--max-model-len", "512") as url:
        run = train(
            *(spec, folder / "runs", f"--learner.teacher.url={url}"),
            *("--policy.max_model_len=500", "--learner.eval.every=0"),
            "--learner.algorithm.distillation.alone=true",
            timeout_s=400.0,
        )
    return Distilled(run, quick_policy)


def test_the_policy_comes_closer_to_its_teacher(distilled: Distilled) -> None:
    run = distilled.run
    assert run.exit_code == 0, run.output[-4000:]
    gaps = [row["teacher/reverse_kl"] for row in run.metrics("teacher/reverse_kl")]
    assert len(gaps) == STEPS
    assert np.mean(gaps[-2:]) < 0.7 * gaps[0], gaps


def test_the_journaled_scores_are_those_that_transformers_gives_the_same_tokens(
    distilled: Distilled,
) -> None:
    run, scorer = distilled.run, Scorer(distilled.teacher)
    planned = run.trajectories("state = 'planned' AND step = 1")
    with open_read_only(run.journal) as db:
        found = scores_of(db, [each.key for each in planned])
    assert planned
    for attempt in planned:
        for sequence, scores in zip(attempt.sequences, found[attempt.key], strict=True):
            places = np.flatnonzero(policy_mask(sequence.spans))
            expected = scorer.logprobs(sequence.token_ids, places, 1.0)
            np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=TOLERANCE)
