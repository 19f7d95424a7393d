"""Advantage estimators: how much better an attempt, or a token of it, was than expected.

An estimator maps the rewards of a whole step's batch to one float64 per policy token. Rewards
belong to attempts: one of several sequences (after a context compaction) counts once. Groups are
identified by id. With a KL penalty in the reward, an attempt's outcome is its reward minus the
penalties of its tokens.

Estimators within groups (grpo, dr_grpo, rloo, max_rl, opo, mt_grpo) compare the graded attempts of
one group id and nothing else; a group without a signal (one attempt, or all outcomes equal, and
for mt_grpo the rewards of each turn as well) has advantage exactly 0. Estimators over the batch
(reinforce_pp, reinforce_pp_baseline, gdpo, gae) compare with the batch or a critic: a group whose
attempts all passed then does carry a signal, and only a batch whose returns (for
reinforce_pp_baseline and gdpo: what attempts differ by within their groups) are all equal has
advantage exactly 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.algo.gae import GaeEstimate, TokenValues, compute_gae, returns_to_go, whiten
from flotilla_learner.algo.plugin_registry import Registry
from flotilla_learner.config.algorithm import AlgorithmConfig, CriticConfig
from flotilla_learner.types import TurnTokens

Rewards = NDArray[np.float64]
# Maps the outcomes of one group's attempts, at least two of them different, to their advantages.
GroupEstimator = Callable[[Rewards], Rewards]
# The same of outcomes and of the attempts' numbers of policy tokens, float64.
LengthEstimator = Callable[[Rewards, Rewards], Rewards]

_STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class BatchRewards:
    """Rewards of a step's batch, sequence by sequence.

    An attempt's sequences are in sampling order and carry the same reward."""

    group_ids: Sequence[str]
    attempt_indices: Sequence[int]
    rewards: Sequence[float]
    # [policy tokens] per sequence: rewards of single tokens, 0 without a KL in the reward.
    token_rewards: Sequence[TokenValues]
    # [policy tokens] per sequence: the critic's values before the step. None without a critic.
    values: Sequence[TokenValues] | None = None
    # Per sequence, its tokens by turn; empty where no turn of the attempt was rewarded.
    turns: Sequence[Sequence[TurnTokens]] = ()
    # Per sequence, the named rewards of its attempt.
    named_rewards: Sequence[Mapping[str, float]] = ()

    @property
    def attempts(self) -> dict[tuple[str, int], list[int]]:
        """The sequences of each attempt, by (group id, attempt index).

        Raises ValueError if two sequences of one attempt carry different rewards, or if a
        reward is not finite.
        """
        attempts: dict[tuple[str, int], list[int]] = {}
        keys = zip(self.group_ids, self.attempt_indices, strict=True)
        for sequence, (group, attempt) in enumerate(keys):
            known = attempts.setdefault((group, attempt), [sequence])
            first, reward = self.rewards[known[0]], self.rewards[sequence]
            _check_reward(group, attempt, first, reward)
            if known[0] != sequence:
                known.append(sequence)
        return attempts


# Returns one float64 array [policy tokens] per sequence, in batch order.
Estimator = Callable[[BatchRewards, AlgorithmConfig], list[TokenValues]]

ADVANTAGES: Registry[Estimator] = Registry("advantage")


def within_groups(name: str) -> Callable[[GroupEstimator], GroupEstimator]:
    """Register an estimator of one group's outcomes: all tokens of an attempt get its advantage.

    It is never called for groups without a signal."""

    def register_estimator(estimator: GroupEstimator) -> GroupEstimator:
        def estimate_batch(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
            return _estimate_groups(batch, lambda outcomes, lengths: estimator(outcomes))

        ADVANTAGES.register(name)(estimate_batch)
        return estimator

    return register_estimator


@within_groups("grpo")
def grpo(rewards: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-6), with the sample standard deviation.

    GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + _STD_FLOOR)


@within_groups("dr_grpo")
def dr_grpo(rewards: Rewards) -> Rewards:
    """r - mean: no division by the standard deviation, which favours the easiest and hardest.

    Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    return rewards - rewards.mean()


@within_groups("rloo")
def rloo(rewards: Rewards) -> Rewards:
    """r minus the mean of the *other* attempts, an unbiased baseline.

    RLOO, arXiv 2402.14740; equal to n / (n - 1) * (r - mean).
    """
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


@within_groups("max_rl")
def max_rl(rewards: Rewards) -> Rewards:
    """(r - mean) / mean: weights a task by the inverse of its pass rate, like maximum likelihood.

    MaxRL, arXiv 2602.02710, for non-negative rewards. If the mean is not positive, there is no
    success to divide by, and the group has advantage 0.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


@ADVANTAGES.register("opo")
def opo(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """r minus the group's mean reward, weighted by the attempts' policy tokens.

    OPO, arXiv 2505.23585: the baseline of least variance, sum(n r) / sum(n), where the norm of an
    attempt's gradient is taken to grow with its number of tokens n, in all its sequences."""

    def centre(outcomes: Rewards, lengths: Rewards) -> Rewards:
        # Without a token there is no advantage to give.
        return outcomes - (lengths @ outcomes) / max(1.0, lengths.sum())

    return _estimate_groups(batch, centre)


@ADVANTAGES.register("mt_grpo")
def mt_grpo(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """grpo's advantage; in turns that the environment rewarded, plus turn_coefficient times grpo's
    of the turn's reward among those that the group's attempts got in the turn of that number.

    MT-GRPO, arXiv 2505.11821, in which the first of two turns is rewarded. A turn without a reward
    is compared with none and has the outcome's advantage alone, as the last turn has there."""
    found = _estimate_groups(batch, lambda outcomes, lengths: grpo(outcomes))
    by_turn = _turn_advantages(batch)
    keys = zip(batch.group_ids, batch.attempt_indices, batch.turns, strict=False)
    for place, (group, attempt, turns) in enumerate(keys):
        values = [by_turn.get((group, turn.turn), {}).get(attempt, 0.0) for turn in turns]
        added = np.repeat(np.array(values, np.float64), np.array([t.tokens for t in turns], int))
        # A sequence that was cut has lost its last tokens.
        kept = min(len(added), len(found[place]))
        found[place][:kept] += config.turn_coefficient * added[:kept]
    return found


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """Returns from each token on, whitened over all policy tokens of the batch.

    REINFORCE++, arXiv 2501.03262: A_t = r - coefficient * (sum of the KL estimates from t on),
    then (A_t - mean) / std. Baseline and scale are those of the whole batch, not of a group, so
    advantages are exactly 0 only if all returns of the batch are equal.
    """
    per_attempt = {
        key: returns_to_go(rewards) for key, rewards in _attempt_token_rewards(batch).items()
    }
    return _whiten_all(_split_by_sequence(batch, per_attempt))


@ADVANTAGES.register("reinforce_pp_baseline")
def reinforce_pp_baseline(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """r minus the mean of its group, whitened over all policy tokens of the batch.

    REINFORCE++ with a baseline, arXiv 2501.03262: groups share one scale, so a group's spread
    does not decide its weight. Groups without a signal are 0 before they are whitened."""
    return _whiten_all(_estimate_groups(batch, lambda outcomes, lengths: dr_grpo(outcomes)))


@ADVANTAGES.register("gdpo")
def gdpo(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """The weighted sum of grpo's advantages of each named reward, whitened over all policy tokens.

    GDPO, arXiv 2601.05242: rewards that are normalised one by one keep apart what their sum would
    make equal. Under a name that it lacks, an attempt is compared with none, and adds 0 to the sum.
    Raises ValueError if no attempt has any of the names in `rewards`."""
    attempts, named = batch.attempts, batch.named_rewards
    known = {name for own in named for name in own}
    if attempts and not known & config.rewards.keys():
        raise ValueError(
            f"no attempt has any of algorithm.rewards ({', '.join(config.rewards)}); what the"
            f' verifiers return as "rewards": {", ".join(sorted(known)) or "nothing"}'
        )
    total = [np.zeros(len(tokens)) for tokens in batch.token_rewards]
    by_attempt = {key: named[rows[0]] for key, rows in attempts.items()}
    for name, weight in config.rewards.items():
        outcomes = {key: own[name] for key, own in by_attempt.items() if name in own}
        found = _estimate_groups(batch, lambda rewards, lengths: grpo(rewards), outcomes)
        total = [left + weight * right for left, right in zip(total, found, strict=True)]
    return _whiten_all(total)


@ADVANTAGES.register("gae")
def gae_with_critic(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """Generalised advantage estimation with the critic's values, whitened over the batch.

    PPO, arXiv 1707.06347, equation 11. Raises ValueError without values.
    """
    estimates = _gae_estimates(batch, config.critic)
    advantages = {key: found.advantages for key, found in estimates.items()}
    return _whiten_all(_split_by_sequence(batch, advantages))


def critic_targets(batch: BatchRewards, config: AlgorithmConfig) -> list[TokenValues]:
    """Return the critic's target for each token: advantage (not whitened) plus value."""
    estimates = _gae_estimates(batch, config.critic)
    return _split_by_sequence(batch, {key: found.returns for key, found in estimates.items()})


def _check_reward(group: str, attempt: int, first: float, reward: float) -> None:
    if not math.isfinite(reward):
        raise ValueError(f"reward of attempt {attempt} of group {group!r} is {reward}")
    if first != reward:
        raise ValueError(
            f"attempt {attempt} of group {group!r} has two rewards, {first} and {reward}"
        )


def _attempt_outcomes(batch: BatchRewards) -> dict[tuple[str, int], float]:
    """Return the outcome of each attempt: its reward plus those of all its tokens."""
    by_token = [float(tokens.sum()) for tokens in batch.token_rewards]
    return {
        key: batch.rewards[rows[0]] + sum(by_token[i] for i in rows)
        for key, rows in batch.attempts.items()
    }


def _estimate_groups(
    batch: BatchRewards,
    estimator: LengthEstimator,
    outcomes: Mapping[tuple[str, int], float] | None = None,
) -> list[TokenValues]:
    """Return the advantages of all tokens, each that of its attempt.

    `outcomes` are what is compared, by default the attempts' own. Advantages are exactly 0 in
    groups without a signal, for which the estimator is not called, and of attempts without an
    outcome, which are compared with none."""
    outcomes = _attempt_outcomes(batch) if outcomes is None else outcomes
    groups: dict[str, list[tuple[str, int]]] = {}
    lengths: dict[tuple[str, int], int] = {}
    for key, rows in batch.attempts.items():
        if key in outcomes:
            groups.setdefault(key[0], []).append(key)
        lengths[key] = sum(len(batch.token_rewards[i]) for i in rows)
    values = dict.fromkeys(lengths, 0.0)
    for keys in groups.values():
        rewards = np.array([outcomes[key] for key in keys], np.float64)
        # Compared, not computed: the mean of equal floats may differ from them in the last bit.
        if np.any(rewards != rewards[0]):
            counts = np.array([lengths[key] for key in keys], np.float64)
            values |= dict(zip(keys, estimator(rewards, counts).tolist(), strict=True))
    tokens = zip(batch.group_ids, batch.attempt_indices, batch.token_rewards, strict=True)
    return [np.full(len(own), values[group, attempt]) for group, attempt, own in tokens]


def _turn_advantages(batch: BatchRewards) -> dict[tuple[str, int], dict[int, float]]:
    """Return grpo's advantage of each rewarded turn, by (group id, turn) and attempt.

    Turns that were rewarded alike, or in one attempt alone, are left out."""
    rewards: dict[tuple[str, int], dict[int, float]] = {}
    for group, attempt, turns in zip(
        batch.group_ids, batch.attempt_indices, batch.turns, strict=False
    ):
        for turn in turns:
            if turn.reward is not None:
                rewards.setdefault((group, turn.turn), {})[attempt] = turn.reward
    return {
        key: dict(zip(own, grpo(np.array(list(own.values()))).tolist(), strict=True))
        for key, own in rewards.items()
        if len(set(own.values())) > 1
    }


def _attempt_token_rewards(batch: BatchRewards) -> dict[tuple[str, int], TokenValues]:
    """Return the rewards [policy tokens] of each attempt, its own added to the last token's."""
    rewards: dict[tuple[str, int], TokenValues] = {}
    for key, rows in batch.attempts.items():
        tokens = np.concatenate([batch.token_rewards[i] for i in rows]).astype(np.float64)
        tokens[-1:] += batch.rewards[rows[0]]
        rewards[key] = tokens
    return rewards


def _gae_estimates(batch: BatchRewards, config: CriticConfig) -> dict[tuple[str, int], GaeEstimate]:
    if batch.values is None:
        raise ValueError("advantage 'gae' needs a critic's values")
    values = batch.values
    found: dict[tuple[str, int], GaeEstimate] = {}
    rewards = _attempt_token_rewards(batch)
    for key, rows in batch.attempts.items():
        predicted = np.concatenate([values[i] for i in rows]).astype(np.float64)
        found[key] = compute_gae(rewards[key], predicted, config.discount, config.trace_decay)
    return found


def _whiten_all(sequences: list[TokenValues]) -> list[TokenValues]:
    """Whiten the tokens of all sequences together."""
    if not sequences:
        return []
    flat = whiten(np.concatenate(sequences))
    return np.split(flat, np.cumsum([len(tokens) for tokens in sequences])[:-1])


def _split_by_sequence(
    batch: BatchRewards, per_attempt: Mapping[tuple[str, int], TokenValues]
) -> list[TokenValues]:
    """Split the tokens of each attempt among its sequences, in the batch's order."""
    found: dict[int, TokenValues] = {}
    for key, rows in batch.attempts.items():
        ends = np.cumsum([len(batch.token_rewards[i]) for i in rows])[:-1]
        found |= dict(zip(rows, np.split(per_attempt[key], ends), strict=True))
    return [found[i] for i in range(len(batch.rewards))]
