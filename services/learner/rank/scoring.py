"""Logprobs and values of a whole batch, without a gradient."""

from collections.abc import Sequence

import torch

from services.learner.algo.logprob_head import token_logprobs
from services.learner.rank.critic import Critic
from services.learner.rank.model import Policy
from services.learner.rank.packed_rows import ByRow, Packer, Row, Targets, by_row


@torch.no_grad()
def score_rows(policy: Policy, rows: Sequence[Row], packer: Packer, *, chunk: int) -> ByRow:
    """What the policy, at each row's temperature, gives its policy tokens.

    Of every row that has any, whichever rank computed it.
    """
    own: ByRow = {}
    for pack in packer.packs(rows):
        targets = Targets.of(pack, policy.device)
        hidden = policy.hidden([row.token_ids for row in pack])[targets.positions]
        logprobs = token_logprobs(
            hidden, policy.head, targets.token_ids, targets.temperature, chunk=chunk
        )
        own |= by_row(logprobs, pack)
    return packer.collect(own, rows)


@torch.no_grad()
def value_rows(critic: Critic, rows: Sequence[Row], packer: Packer) -> ByRow:
    """What the critic says of each policy token, likewise."""
    own: ByRow = {}
    for pack in packer.packs(rows):
        targets = Targets.of(pack, packer.policy.device)
        own |= by_row(critic.values(pack, targets), pack)
    return packer.collect(own, rows)
