"""Comparison of engines' logprobs with those of the weights that sampled them."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from flotilla_common.domain.trajectory import Experts
from flotilla_common.images.picture import PlacedPicture
from flotilla_learner.algo.logprob_head import token_logprobs
from flotilla_learner.algo.mismatch import measure_version_mismatch
from flotilla_learner.algo.packing import Segments
from flotilla_learner.algo.predicting_positions import predicting_positions
from flotilla_learner.algo.sampled_candidates import join_candidates
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.lora import Adapters
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.sharding import local_slices, local_tensor
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.rank.weight_streaming import streamed_weights
from flotilla_learner.types import (
    Comparison,
    PositionBand,
    TrainBatch,
    TrainSequence,
    VersionMismatch,
)

# Tokens of a sequence, the positions among them that predict the policy's, the engine's experts,
# and the pictures shown.
_Piece = tuple[NDArray[np.int32], NDArray[np.int64], Experts | None, list[PlacedPicture]]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Policy tokens of some sequences, end to end; every tensor is [n]."""

    targets: Tensor
    behaviour: Tensor
    temperature: Tensor
    # Each token's place in its sequence, and the sequence's place in the batch.
    positions: NDArray[np.int64]
    sequence: NDArray[np.int64]
    # Bool, true where the engine scored a token that it had not sampled; None if nowhere.
    canary: Tensor | None
    # [n, most]: see `join_candidates`.
    candidates: Tensor | None

    @staticmethod
    def from_batch(
        batch: TrainBatch, indices: Sequence[int], device: torch.device
    ) -> "PolicyTokens":
        rows = [(index, batch.sequences[index]) for index in indices]
        places = [predicting_positions(row.policy_mask) + 1 for _, row in rows]

        def concat_to_tensor(values: list[NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate(values)).to(device, dtype)

        pairs = list(zip(rows, places, strict=True))
        heat = [np.full(len(place), row.temperature) for (_, row), place in pairs]
        given = [np.full(len(place), row.canary) for (_, row), place in pairs]
        limits = join_candidates([row.candidates for _, row in rows], list(map(len, places)))
        return PolicyTokens(
            concat_to_tensor([row.token_ids[place] for (_, row), place in pairs], torch.int64),
            concat_to_tensor(
                [row.behaviour_logprobs[place] for (_, row), place in pairs], torch.float64
            ),
            concat_to_tensor(list(heat), torch.float32),
            np.concatenate(places),
            np.concatenate([np.full(len(place), index) for (index, _), place in pairs]),
            concat_to_tensor(list(given), torch.bool) if any(s.canary for _, s in rows) else None,
            None if limits is None else torch.from_numpy(limits).to(device),
        )


@torch.no_grad()
def predicting_states(policy: Policy, sequences: Sequence[TrainSequence], budget: int) -> Tensor:
    """Return the hidden states [n, width] that predict the policy tokens of each sequence.

    Sequences are computed in packs of at most `budget` tokens, if the model allows packs."""
    parts: list[Tensor] = []
    for pack in _pack_neighbours(sequences, budget if policy.packable else 1):
        token_ids = [ids for ids, *_ in pack]
        starts = np.cumsum([0, *map(len, token_ids)])
        positions = [where + start for (_, where, *_), start in zip(pack, starts, strict=False)]
        experts, pictures = [each[2] for each in pack], [each[3] for each in pack]
        segments = Segments(token_ids, experts=experts, pictures=pictures)
        hidden = policy.segment_states(segments, policy.make_pass(segments))
        parts.append(hidden[torch.from_numpy(np.concatenate(positions)).to(policy.device)])
    return torch.cat(parts)


def _pack_neighbours(sequences: Sequence[TrainSequence], budget: int) -> list[list[_Piece]]:
    """Pack neighbouring sequences together, in order."""
    packs: list[list[_Piece]] = []
    room = 0
    for sequence in sequences:
        positions = predicting_positions(sequence.policy_mask)
        # Tokens after the last policy token change nothing.
        ids = sequence.token_ids[: int(positions[-1]) + 1]
        if not packs or len(ids) > room:
            packs.append([])
            room = budget
        seen = [place for place in sequence.pictures if place.offset < len(ids)]
        packs[-1].append((ids, positions, sequence.experts, seen))
        room -= len(ids)
    return packs


def score_states(
    policy: Policy, hidden: Tensor, tokens: PolicyTokens, head: Tensor, chunk: int
) -> Tensor:
    """Return the logprobs of policy tokens [n], given the states that predict them."""
    columns = (hidden, head, tokens.targets, tokens.temperature)
    limits = {"banned": policy.banned, "candidates": tokens.candidates}
    found = token_logprobs(*columns, chunk=chunk, **limits)
    if policy.banned is None or tokens.canary is None:
        return found
    return torch.where(tokens.canary, token_logprobs(*columns, chunk=chunk), found)


@contextmanager
def swapped_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> Generator[None]:
    """Have the policy compute with these weights in place of its own while the block runs.

    They are in host memory, and each is on the device only while it is used. Parameters that are
    split over ranks are overwritten, each rank's part separately, while their newest values wait in
    host memory; so are adapters that were published alone."""

    def choose(name: str, own: Tensor) -> Tensor:
        other = tensors.get(name)
        # Moved first: published weights may have half as many bytes.
        return own if other is None else other.to(own.device).to(own.dtype)

    with ExitStack() as stack:
        if policy.adapters is not None:
            tensors = stack.enter_context(_swapped_adapters(policy.adapters, tensors))
        if policy.is_split:
            stack.enter_context(_overwritten_parts(policy.named_parameters(), tensors))
        else:
            stack.enter_context(streamed_weights(policy, choose))
        yield


@contextmanager
def _swapped_adapters(
    adapters: Adapters, tensors: Mapping[str, Tensor]
) -> Generator[Mapping[str, Tensor]]:
    """Use the adapters in `tensors`; yield the rest, without adapters, since these are
    merged into them."""
    own = adapters.file_parameters()
    beside = {name: adapters.unscale(name, tensors[name]) for name in tensors if name in own}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    layers = [name.removesuffix(".weight") for name in rest]
    with adapters.used(None, layers), _overwritten_parts(own, beside):
        yield rest


@contextmanager
def _overwritten_parts(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> Generator[None]:
    newest: list[tuple[Tensor, Tensor]] = []
    try:
        for name, tensor in tensors.items():
            parameter = parameters[name].detach()
            part = local_tensor(parameter)
            newest.append((part, part.to("cpu", copy=True)))
            if part.numel():
                split = isinstance(parameter, DTensor)
                part.copy_(tensor[local_slices(parameter)] if split else tensor)
        yield
    finally:
        for part, data in newest:
            part.copy_(data)


@dataclass(frozen=True, slots=True)
class ScoreComparer:
    """Compares on one rank, and leaves model and optimizer unchanged."""

    policy: Policy
    slots: WeightSlots
    rank: RankConfig
    # Position at which errors are split; the median if None.
    split: int | None

    def compare_batch(self, batch: TrainBatch) -> Comparison:
        """Compare the sequences whose weights are still held, each under its own.

        `batch.step - 1` is the version of the weights in the model."""
        versions: dict[int, VersionMismatch] = {}
        by_sequence: list[float | None] = [None] * len(batch.sequences)
        off: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        for version, indices in self._group_by_version(batch):
            tokens = PolicyTokens.from_batch(batch, indices, self.policy.device)
            with self._version_weights(version, newest=batch.step - 1):
                logprobs = self.score_tokens([batch.sequences[i] for i in indices], tokens)
            versions[version] = measure_version_mismatch(logprobs, tokens.behaviour)
            size = (logprobs.double() - tokens.behaviour).abs().cpu().numpy()
            off.append((tokens.positions, size))
            for index in indices:
                by_sequence[index] = float(size[tokens.sequence == index].mean())
        return Comparison(versions, tuple(by_sequence), _error_bands(off, self.split))

    def score_tokens(self, sequences: Sequence[TrainSequence], tokens: PolicyTokens) -> Tensor:
        """Return the logprobs of the policy tokens [n] under the model's current weights."""
        hidden = predicting_states(self.policy, sequences, self.rank.pack_tokens)
        return score_states(self.policy, hidden, tokens, self.policy.head, self.rank.head_chunk)

    def _group_by_version(self, batch: TrainBatch) -> Iterator[tuple[int, list[int]]]:
        newest = batch.step - 1
        found: dict[int, list[int]] = {}
        for index, sequence in enumerate(batch.sequences):
            version = newest - sequence.staleness
            if version in {newest, *self.slots.versions} and sequence.policy_mask[1:].any():
                found.setdefault(version, []).append(index)
        yield from sorted(found.items())

    @contextmanager
    def _version_weights(self, version: int, *, newest: int) -> Generator[None]:
        older = {} if version == newest else dict(self.slots.iter_tensors(version))
        with swapped_weights(self.policy, older):
            yield


def _error_bands(
    off: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], split: int | None
) -> tuple[PositionBand, ...]:
    """Return the mean error below a position and from it on; one band if one side is empty."""
    if not off:
        return ()
    positions = np.concatenate([where for where, _ in off])
    size = np.concatenate([much for _, much in off])
    middle = int(np.median(positions)) if split is None else split
    end = int(positions.max()) + 1
    edges = [(0, min(middle, end)), (middle, end)]
    return tuple(
        PositionBand(low, high, float(size[(positions >= low) & (positions < high)].mean()))
        for low, high in edges
        if ((positions >= low) & (positions < high)).any()
    )
