"""Alarm thresholds: `[learner.alarms]`. See docs/metrics.md."""

from pydantic import Field

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Count, Share, Steps


class AlarmsConfig(ConfigModel):
    """Thresholds. A ratio covers the last `window` steps, or more until it has `count` items."""

    window: Steps = 8
    count: Count = 32
    # Smallest share of groups whose attempts differ in reward.
    signal_ratio: Share = 0.25
    # If attempts at an environment hardly differ but pass at this share, it counts as solved.
    solved_share: Share = 0.9
    # Largest share of tries without a known grade.
    no_grade_rate: Share = 0.1
    # Largest share of tool calls that end in an error.
    tool_error_rate: Share = 0.5
    # Largest share of groups dropped as too old.
    stale_share: Share = 0.2
    # Factor by which attempts are longer, or shorter, than in the run's first `window` steps.
    length_factor: float = Field(default=3.0, gt=1, le=1000)
    # Smallest entropy, as a share of that of the first `window` steps.
    entropy_share: float = Field(default=0.1, ge=0, lt=1)
    # Smallest drop of pass@1 on a set of tasks, from its best so far, beyond chance.
    eval_fall: Share = 0.05
    # Consecutive tries at one environment without a grade.
    failing_tries: Count = 16
    # Consecutive steps in which no attempt in an environment got a reward other than 0.
    no_reward_steps: Steps = 3
    # Tasks of one environment that are given up within `window` steps.
    given_up_tasks: Count = 3
