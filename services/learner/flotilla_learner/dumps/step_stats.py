"""Values of a step's tokens, assigned from the ranks' order to its attempts."""

from collections.abc import Sequence

import numpy as np

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.run_folder.token_stats import SequenceStats, StepStats, TokenStatsError
from flotilla_learner.types import Standing, StepTokens


def join_stats(
    step: int, base_version: int, attempts: Sequence[Trajectory], tokens: StepTokens
) -> StepStats:
    """Assign the ranks' values to `attempts`, which are in the plan's order.

    Raises TokenStatsError if they do not fit these attempts."""
    places = [
        (attempt.key, index, len(sequence.logprobs))
        for attempt in attempts
        for index, sequence in enumerate(attempt.sequences)
    ]
    lengths = [len(values) for values in tokens.advantages]
    if lengths != [count for _, _, count in places]:
        raise TokenStatsError(
            f"the ranks returned values for {len(lengths)} sequences with {sum(lengths)} tokens,"
            f" but the plan of step {step} has {len(places)} with"
            f" {sum(count for _, _, count in places)}"
        )
    columns = (
        *(tokens.standings, tokens.advantages, tokens.logprobs, tokens.entropy),
        tokens.corrections,
    )
    return StepStats(
        step,
        base_version,
        {
            (key, index): SequenceStats(
                standing is Standing.TRAINED,
                _explain_standing(standing, count),
                advantages,
                logprobs,
                entropy.astype(np.float16),
                weights,
            )
            for (key, index, count), standing, advantages, logprobs, entropy, weights in zip(
                places, *columns, strict=True
            )
        },
    )


def _explain_standing(standing: Standing, policy_tokens: int) -> str:
    if standing is Standing.TRAINED:
        return ""
    if standing is Standing.NO_SIGNAL:
        return "no signal"
    return "overlong" if policy_tokens else "no policy tokens"
