"""A trained policy that scores what another samples, in this process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.algorithms.run import open_policy
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.step_examples import rows_of
from flotilla_learner.types import StepSettings, TeacherScores, TrainBatch


class Teacher:
    """The policy whose parameters a run wrote to `last`; `start` is the folder of its start."""

    def __init__(self, start: Path, last: Path) -> None:
        self._policy = open_policy(start)
        own = self._policy.named_parameters()
        with torch.no_grad():
            for name, trained in torch.load(last).items():
                own[name].copy_(trained)
        self._packer = RowPacker(self._policy, RankConfig().pack_tokens, Replicas())

    def teach(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with this policy's logprobs of every sampled token."""
        found = score_rows(
            self._policy, rows_of(batch), self._packer, chunk=RankConfig().head_chunk
        )
        sequences = tuple(
            replace(sequence, teacher=_make_scores(found.get(index, np.zeros(0))))
            for index, sequence in enumerate(batch.sequences)
        )
        return replace(batch, sequences=sequences, settings=StepSettings(taught=True))


def _make_scores(logprobs: np.ndarray) -> TeacherScores:
    none = len(logprobs), 0
    return TeacherScores(
        logprobs.astype(np.float32), np.zeros(none, np.int32), np.zeros(none, np.float32)
    )
