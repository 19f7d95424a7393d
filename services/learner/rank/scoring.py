"""Logprobs and values of a whole batch, without a gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.learner.algo.logprob_head import token_logprobs
from services.learner.rank.critic import Critic
from services.learner.rank.model import Policy
from services.learner.rank.packed_rows import ByRow, PackTargets, Row, RowPacker, split_by_row


@torch.no_grad()
def score_rows(policy: Policy, rows: Sequence[Row], packer: RowPacker, *, chunk: int) -> ByRow:
    """Return the policy's logprobs of each row's policy tokens, at the row's temperature.

    The result has every row with policy tokens, from all ranks."""
    found: list[Tensor] = []
    own: list[Row] = []
    for pack in packer.iter_packs(rows):
        if not pack.rows:
            policy.pass_idly()
            continue
        targets = PackTargets.from_pack(pack, policy.device)
        segments = pack.segments
        hidden = policy.segment_states(segments, policy.make_pass(segments))[targets.positions]
        logprobs = token_logprobs(
            hidden, policy.head, targets.token_ids, targets.temperature, chunk=chunk
        )
        found.append(logprobs)
        own += pack.rows
    return packer.gather_by_row(split_by_row(found, own), rows)


@torch.no_grad()
def predict_row_values(critic: Critic, rows: Sequence[Row], packer: RowPacker) -> ByRow:
    """Return the critic's value of each policy token, likewise."""
    found: list[Tensor] = []
    own: list[Row] = []
    for pack in packer.iter_packs(rows):
        if not pack.rows:
            critic.pass_idly()
            continue
        targets = PackTargets.from_pack(pack, packer.policy.device)
        found.append(critic.predict_values(pack, targets))
        own += pack.rows
    return packer.gather_by_row(split_by_row(found, own), rows)
