"""Burn-in: the longest pack forward and backward, before the first step."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from flotilla_common.images.picture import PlacedPicture
from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_learner.algo.objective import Objective
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.gradient_accumulator import GradientAccumulator
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.step_examples import TrainExample, rows_of
from flotilla_learner.ranks.burn_in import BurnInMemoryError, BurnInPeaks, burn_in_lengths
from flotilla_learner.types import TrainBatch, TrainSequence

# Torch's message when an operating system has no more memory for a CPU.
_NO_MEMORY = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class BurnIn:
    """One pass of policy and critic that leaves parameters, moments and gradients unchanged.

    All tokens are policy tokens, or most of them those of pictures if the policy sees any, and
    memory of the moments' size is held meanwhile, so that a step can do whatever passes here."""

    policy: Policy
    critic: Critic | None
    optimizer: Optimizer
    algorithm: AlgorithmConfig
    rank: RankConfig

    def run(self, max_model_len: int) -> BurnInPeaks:
        """Run the pass with sequences of at most so many tokens.

        Collective. Raises BurnInMemoryError."""
        began = time.monotonic()
        tokens = self.rank.pack_tokens if self.policy.packable else 1
        lengths = burn_in_lengths(tokens, max_model_len)
        try:
            with _memory_errors(sum(lengths)):
                self._make_pass(lengths)
        finally:
            for optimizer in self._optimizers:
                optimizer.discard_gradients()
        return BurnInPeaks(sum(lengths), time.monotonic() - began, *self._release_memory())

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [self.optimizer, *([self.critic.optimizer] if self.critic is not None else [])]

    def _make_pass(self, lengths: list[int]) -> None:
        moments = [optimizer.reserve_moments() for optimizer in self._optimizers]
        batch = self._make_batch(lengths)
        examples = [self._make_example(row) for row in rows_of(batch)]
        # One pack on every rank, whatever the others compute, and no shared prompt.
        alone = replace(self.policy, shares_prompts=False)
        packer = RowPacker(alone, sum(lengths), Replicas())
        accumulator = GradientAccumulator(
            self.policy,
            self.critic,
            packer,
            chunk=self.rank.head_chunk,
            entropy_bonus=self.algorithm.entropy_coefficient != 0,
        )
        with self.policy.showing(batch):
            accumulator.add_policy_gradients(examples, Objective(self.algorithm))
            if self.critic is not None:
                accumulator.add_critic_gradients(examples)
        del moments

    def _make_batch(self, lengths: list[int]) -> TrainBatch:
        sequences: list[TrainSequence] = []
        files: dict[str, bytes] = {}
        for index, length in enumerate(lengths):
            token_ids = np.resize(canary_token_ids(self.policy.vocabulary), length)
            places: tuple[PlacedPicture, ...] = ()
            if self.policy.vision is not None:
                token_ids, shown = self.policy.vision.fill(token_ids, len(files))
                files |= {each.picture.sha256: each.picture.data for each in shown}
                places = tuple(each.place for each in shown)
            sequences.append(self._make_sequence(index, token_ids, places))
        return TrainBatch(1, tuple(sequences), pictures=files)

    def _make_sequence(
        self, index: int, token_ids: NDArray[np.int32], places: tuple[PlacedPicture, ...]
    ) -> TrainSequence:
        mask = np.arange(len(token_ids)) > 0
        if self.policy.vision is not None:
            mask &= ~np.isin(token_ids, self.policy.vision.family.banned_ids)
        behaviour = np.where(mask, -np.log(self.policy.vocabulary), 0).astype(np.float32)
        return TrainSequence(
            *("burn-in", index, 1.0, token_ids, mask, behaviour, 1.0, 0), pictures=places
        )

    def _make_example(self, row: Row) -> TrainExample:
        ones = np.ones(len(row.positions))
        objective = Objective(self.algorithm)
        return TrainExample(
            row,
            advantages=ones,
            moves=True,
            weight=1.0,
            proximal=row.behaviour if objective.needs_proximal_logprobs else None,
            reference=row.behaviour if objective.needs_reference_logprobs else None,
            values=None if self.critic is None else ones.astype(np.float32),
            returns=None if self.critic is None else ones,
        )

    def _release_memory(self) -> tuple[int, int]:
        """Return the peaks of host and device, and free the memory of the pass."""
        device = 0
        if self.policy.device.type == "cuda":
            device = torch.cuda.max_memory_allocated(self.policy.device)
            torch.cuda.empty_cache()
        return peak_memory_bytes(), device


@contextmanager
def _memory_errors(tokens: int) -> Generator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_of_memory(error):
            raise
        raise BurnInMemoryError(f"a pack of {tokens} tokens: {error}") from error


def _is_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY in str(error)
