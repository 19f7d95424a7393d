"""Difficulty of tasks: detection of those from which the policy can learn nothing now."""

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_learner.config.sampling import DifficultyConfig
from flotilla_learner.sampling.curriculum_changes import TaskStanding, TaskState
from flotilla_learner.sampling.group_signal import GroupOutcome, has_signal


def update_difficulty(
    state: TaskState, outcome: GroupOutcome, config: DifficultyConfig
) -> TaskStanding:
    """Add a group to its task's statistics; return the task's new standing.

    The pass rate is sum(decay^k passes_k) / sum(decay^k attempts_k) over its groups, k = 0 the
    newest: an exponentially weighted mean over attempts. A group with signal is never a reason
    to park its task, whatever its pass rate: partial rewards teach without a pass."""
    state.groups += 1
    passes = sum(reward >= PASS_REWARD for reward in outcome.rewards)
    state.passes = config.decay * state.passes + passes
    state.attempts = config.decay * state.attempts + len(outcome.rewards)
    if has_signal(outcome.rewards) or state.groups < config.min_groups:
        return TaskStanding.ACTIVE
    if state.pass_rate >= config.solved:
        return TaskStanding.SOLVED
    return TaskStanding.IMPOSSIBLE if state.pass_rate <= config.impossible else TaskStanding.ACTIVE
