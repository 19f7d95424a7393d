"""Passes over sequences whose targets and losses a caller names."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_learner.algo.logprob_head import fused_policy_loss, token_logprobs
from flotilla_learner.algo.summed_losses import COUPLED, SUMMED_LOSSES, TargetInputs
from flotilla_learner.rank.device_transfer import to_device
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import Pack, RowPacker
from flotilla_learner.rank.rows import Row
from flotilla_learner.training_types import TargetBatch, TargetScores, TargetSequence


@dataclass(frozen=True, slots=True)
class TargetPasses:
    """Passes of a policy over batches, of which this rank computes its share."""

    packer: RowPacker
    chunk: int

    def run(self, policy: Policy, batch: TargetBatch) -> TargetScores:
        """Return the scores of all sequences, from all ranks; unless only these are wanted, add
        this rank's share of the summed losses' gradient to the parameters'."""
        rows = [_make_row(index, each) for index, each in enumerate(batch.sequences)]
        packs = self.packer.iter_packs(rows)
        done = [self._run_pack(policy, pack, batch) for pack in packs]
        # Only now: reading blocks on the device, and the host can prepare the next pack instead.
        own: dict[int, NDArray[np.float32]] = {}
        for each in done:
            own |= each.logprobs_by_sequence(batch)
        loss = sum(float(each.loss) for each in done)
        lengths = {i: each.target_ids.size for i, each in enumerate(batch.sequences)}
        found = self.packer.replicas.gather_arrays(own, lengths)
        (loss,) = self.packer.replicas.sum_numbers(loss)
        logprobs = [
            found[index].reshape(each.target_ids.shape)
            for index, each in enumerate(batch.sequences)
        ]
        return TargetScores(logprobs, {"loss:sum": loss})

    def _run_pack(self, policy: Policy, pack: Pack, batch: TargetBatch) -> "_DonePack":
        device = policy.device
        targets, given = _make_inputs(_sequences_of(pack, batch), batch, device)
        places = to_device(pack.positions, device)
        temperature = torch.ones(len(targets), device=device)
        compute = SUMMED_LOSSES[batch.loss]
        with torch.set_grad_enabled(not batch.forward_only):
            hidden = policy.segment_states(pack.segments)[places]
            if batch.forward_only:
                logprobs = token_logprobs(
                    hidden, policy.head, targets, temperature, chunk=self.chunk
                )
            else:
                loss, logprobs, _ = fused_policy_loss(
                    *(hidden, policy.head, targets, temperature),
                    lambda part, span: compute(part, given.part(span)),
                    chunk=self.chunk,
                    coupled=batch.loss in COUPLED,
                )
                loss.backward()
        with torch.no_grad():
            return _DonePack(pack, logprobs, compute(logprobs, given).double().sum())


@dataclass(frozen=True, slots=True)
class _DonePack:
    """A pack's results, still on the device."""

    pack: Pack
    # Of the targets, [n] or [n, k].
    logprobs: Tensor
    # Float64.
    loss: Tensor

    def logprobs_by_sequence(self, batch: TargetBatch) -> dict[int, NDArray[np.float32]]:
        """Return the logprobs of each sequence, flat, by its index in the batch."""
        chosen = _sequences_of(self.pack, batch)
        values = self.logprobs.float().cpu().numpy().reshape(len(self.logprobs), -1)
        ends = np.cumsum([len(each.token_ids) for each in chosen])
        parts = np.split(values, ends[:-1])
        return {
            row.index: part[:, : each.target_ids.size // len(each.token_ids)].reshape(-1)
            for row, each, part in zip(self.pack.rows, chosen, parts, strict=True)
        }


def _sequences_of(pack: Pack, batch: TargetBatch) -> list[TargetSequence]:
    return [batch.sequences[row.index] for row in pack.rows]


def _make_row(index: int, sequence: TargetSequence) -> Row:
    """Return the sequence as packs take it: every position predicts, from shared tokens, too."""
    length = len(sequence.token_ids)
    return Row(
        index,
        sequence.token_ids,
        np.arange(length),
        np.zeros(0, np.float32),
        temperature=1.0,
        staleness=0,
        prompt=length - 1,
    )


def _make_inputs(
    chosen: Sequence[TargetSequence], batch: TargetBatch, device: torch.device
) -> tuple[Tensor, TargetInputs]:
    """Return the targets of a pack's sequences, [n] or [n, k], and their inputs."""
    most = max(each.target_ids.size // len(each.token_ids) for each in chosen)
    join = partial(_join_columns, width=most, device=device)
    arrays = {name: join([each.inputs[name] for each in chosen]) for name in chosen[0].inputs}
    lengths = [len(each.token_ids) for each in chosen]
    sequence = to_device(np.repeat(np.arange(len(chosen)), lengths), device)
    targets = join([each.target_ids for each in chosen])
    return targets, TargetInputs(arrays, batch.options, sequence, len(chosen))


def _join_columns(
    arrays: Sequence[NDArray[np.generic]], width: int, device: torch.device
) -> Tensor:
    """Concatenate arrays [n] or [n, k]; narrower ones get zeros, which have no weight."""
    columns = [each.reshape(len(each), -1) for each in arrays]
    wide = [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in columns]
    joined = to_device(np.concatenate(wide), device)
    return joined.squeeze(1) if width == 1 else joined
