"""This rank's packs: rows that are computed in one forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_common.domain.trajectory import Experts
from flotilla_common.images.picture import PlacedPicture
from flotilla_learner.algo.packing import Segments, first_fit_decreasing
from flotilla_learner.algo.prefix_sharing import (
    PrefixCluster,
    Prompted,
    cluster_by_prefix,
    split_for_ranks,
)
from flotilla_learner.algo.sampled_candidates import join_candidates
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.device_transfer import to_device
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.pictures import key_pictures
from flotilla_learner.rank.routing_replay import routed_token_keys
from flotilla_learner.rank.rows import ByRow, Row


@dataclass(frozen=True, slots=True)
class RowCluster:
    """Rows whose first `prefix` tokens are the same, and computed once; 0 for a single row."""

    rows: Sequence[Row]
    prefix: int = 0

    @property
    def segments(self) -> list[NDArray[np.int32]]:
        """The prefix, if there is one, and the rest of each row."""
        shared = [self.rows[0].token_ids[: self.prefix]] if self.prefix else []
        return [*shared, *(row.token_ids[self.prefix :] for row in self.rows)]

    @property
    def experts(self) -> list[Experts | None]:
        """Engine's experts of each segment."""
        named = [row.experts for row in self.rows]
        first = named[0]
        shared = [None if first is None else first[: self.prefix]] if self.prefix else []
        return [*shared, *(None if each is None else each[self.prefix :] for each in named)]

    @property
    def pictures(self) -> list[list[PlacedPicture]]:
        """Pictures of each segment, with their places in it. None lies in two segments."""
        shared = [place for place in self.rows[0].pictures if place.offset < self.prefix]
        rest = [
            [
                replace(place, offset=place.offset - self.prefix)
                for place in row.pictures
                if place.offset >= self.prefix
            ]
            for row in self.rows
        ]
        return [shared, *rest] if self.prefix else rest

    @property
    def positions(self) -> list[NDArray[np.int64]]:
        """Each row's positions among the concatenated tokens of the segments."""
        found: list[NDArray[np.int64]] = []
        before = 0
        for row in self.rows:
            shift = np.where(row.positions < self.prefix, 0, before)
            found.append(row.positions + shift)
            before += len(row.token_ids) - self.prefix
        return found


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows in one forward pass; empty if only other ranks have rows left."""

    clusters: Sequence[RowCluster] = ()

    @property
    def rows(self) -> list[Row]:
        """Rows in the order of their policy tokens."""
        return [row for cluster in self.clusters for row in cluster.rows]

    @property
    def segments(self) -> Segments:
        """Tokens to compute."""
        token_ids: list[NDArray[np.int32]] = []
        parents: list[int | None] = []
        for cluster in self.clusters:
            start, parts = len(token_ids), cluster.segments
            shared = [None, *[start] * len(cluster.rows)] if cluster.prefix else [None]
            parents += shared
            token_ids += parts
        experts = [each for cluster in self.clusters for each in cluster.experts]
        pictures = [each for cluster in self.clusters for each in cluster.pictures]
        return Segments(token_ids, parents, experts, pictures)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of all rows, in their order, among the concatenated tokens of the segments."""
        sizes = [sum(len(ids) for ids in cluster.segments) for cluster in self.clusters]
        starts = np.cumsum([0, *sizes])
        return np.concatenate(
            [
                place + start
                for cluster, start in zip(self.clusters, starts, strict=False)
                for place in cluster.positions
            ]
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of all rows; a shared prompt counts for each."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class PackTargets:
    """Policy tokens of a pack; every tensor is [policy tokens]."""

    # Positions in the pack of the hidden states that predict them.
    positions: Tensor
    token_ids: Tensor
    temperature: Tensor
    # Index of each token's row in the pack.
    sequence: Tensor
    # [policy tokens, most]: see `join_candidates`.
    candidates: Tensor | None

    @staticmethod
    def from_pack(pack: Pack, device: torch.device) -> "PackTargets":
        rows = pack.rows
        counts = [len(row.positions) for row in rows]
        targets = [row.token_ids[row.positions + 1].astype(np.int64) for row in rows]
        temperatures = np.array([row.temperature for row in rows], np.float32)
        columns = (
            pack.positions,
            np.concatenate(targets),
            np.repeat(temperatures, counts),
            np.repeat(np.arange(len(rows)), counts),
        )
        candidates = join_candidates([row.candidates for row in rows], counts)
        return PackTargets(
            *(to_device(column, device) for column in columns),
            candidates=None if candidates is None else to_device(candidates, device),
        )


@dataclass(frozen=True, slots=True)
class RowPacker:
    """Divides rows into the packs that this rank forwards."""

    policy: Policy
    pack_tokens: int
    replicas: Replicas

    def iter_packs(self, rows: Sequence[Row]) -> Iterator[Pack]:
        """Yield this rank's share of the rows that have a policy token, one pack at a time.

        With a split policy every rank gets the same number of packs, because computing one takes
        all ranks: the last may be empty, and are computed by `Policy.pass_idly`."""
        filled = [row for row in rows if len(row.positions)]
        budget = self.pack_tokens if self.policy.packable else 1
        clusters = self._find_clusters(filled, budget)
        places = self.replicas.assign_sequences([cluster.tokens for cluster in clusters])
        own = [clusters[place] for place in places]
        packs = first_fit_decreasing([cluster.tokens for cluster in own], budget)
        # Before the first is computed, because all ranks make the same calls in the same order.
        most = self.replicas.largest_number(len(packs)) if self.policy.is_split else len(packs)
        members = [[own[place] for place in pack] for pack in packs]
        made = [
            Pack([RowCluster([filled[i] for i in c.members], c.prefix) for c in clusters])
            for clusters in members
        ]
        for index, pack in enumerate(made):
            self._expect_pictures(made[index + 1 : index + 2])
            yield pack
        yield from [Pack()] * (most - len(packs))

    def _expect_pictures(self, packs: Sequence[Pack]) -> None:
        if self.policy.vision is not None:
            rows = (row for pack in packs for row in pack.rows)
            self.policy.vision.store.expect(place for row in rows for place in row.pictures)

    def _find_clusters(self, rows: Sequence[Row], budget: int) -> list[PrefixCluster]:
        lengths = [len(row.token_ids) for row in rows]
        if not self.policy.shares_prompts:
            return [PrefixCluster((place,), 0, length) for place, length in enumerate(lengths)]
        prompted = [Prompted(self._token_keys(row), _prompt_of(row)) for row in rows]
        clusters = cluster_by_prefix(prompted, budget)
        return split_for_ranks(clusters, lengths, self.replicas.count)

    def _token_keys(self, row: Row) -> NDArray[np.integer[Any]]:
        """Return keys that distinguish a row's tokens from others, including their experts if those
        are replayed, and their pictures."""
        if self.policy.vision is not None:
            return key_pictures(row.token_ids, row.pictures, self.policy.vision.family)
        if self.policy.routing is None or not self.policy.routing.replays:
            return row.token_ids
        return routed_token_keys(row.token_ids, row.experts)

    def gather_by_row(self, own: ByRow, rows: Sequence[Row]) -> ByRow:
        """Return the values of all rows, from all ranks."""
        lengths = {row.index: len(row.positions) for row in rows if len(row.positions)}
        return self.replicas.gather_arrays(own, lengths)


def _prompt_of(row: Row) -> int:
    # The state before the first policy token is also equal, and predicts it for all.
    return int(row.positions[0]) + 1 if row.prompt is None else row.prompt


def split_by_row(packs: Sequence[Tensor], rows: Sequence[Row]) -> ByRow:
    """Split packs' values [policy tokens] into one float32 array per row index.

    All are read at once, because each read blocks on the device."""
    if not packs:
        return {}
    ends = np.cumsum([len(row.positions) for row in rows])[:-1]
    parts = np.split(torch.cat(list(packs)).detach().float().cpu().numpy(), ends)
    return {row.index: part for row, part in zip(rows, parts, strict=True)}
