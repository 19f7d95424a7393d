"""Logprobs and values of a whole batch, without a gradient."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flotilla_learner.algo.logprob_head import token_logprobs
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import Pack, PackTargets, RowPacker, split_by_row
from flotilla_learner.rank.rows import ByRow, Row


def score_rows(policy: Policy, rows: Sequence[Row], packer: RowPacker, *, chunk: int) -> ByRow:
    """Return the policy's logprobs of each row's policy tokens, at the row's temperature.

    The result has every row with policy tokens, from all ranks."""

    def score_pack(pack: Pack, targets: PackTargets) -> Tensor:
        segments = pack.segments
        hidden = policy.segment_states(segments, policy.make_pass(segments))[targets.positions]
        return token_logprobs(
            *(hidden, policy.head, targets.token_ids, targets.temperature),
            chunk=chunk,
            banned=policy.banned,
            candidates=targets.candidates,
        )

    return _compute_by_row(policy, rows, packer, score_pack)


def predict_row_values(critic: Critic, rows: Sequence[Row], packer: RowPacker) -> ByRow:
    """Return the critic's value of each policy token, likewise."""
    return _compute_by_row(critic, rows, packer, critic.predict_values)


@torch.no_grad()
def _compute_by_row(
    model: Policy | Critic,
    rows: Sequence[Row],
    packer: RowPacker,
    compute: Callable[[Pack, PackTargets], Tensor],
) -> ByRow:
    found: list[Tensor] = []
    own: list[Row] = []
    for pack in packer.iter_packs(rows):
        if not pack.rows:
            model.pass_idly()
            continue
        found.append(compute(pack, PackTargets.from_pack(pack, packer.policy.device)))
        own += pack.rows
    return packer.gather_by_row(split_by_row(found, own), rows)
