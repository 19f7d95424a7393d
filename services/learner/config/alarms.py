"""Alarm thresholds and the webhook: `[learner.alarms]`. See docs/metrics.md."""

import re

from pydantic import Field, field_validator

from services.common.config import ConfigModel
from services.common.number_ranges import Count, Share, Steps

_WEBHOOK = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*|https?://\S+")


class AlarmsConfig(ConfigModel):
    """Thresholds. A ratio is judged over `window` steps, or more until it has `count` things."""

    # A URL that takes {"text": ...}, as Slack's do, or $NAME of an environment variable with one.
    webhook: str | None = None
    window: Steps = 8
    count: Count = 32
    # Least share of groups whose attempts differ in reward.
    signal_ratio: Share = 0.25
    # An environment whose attempts pass in so large a share is solved where they hardly differ.
    solved_share: Share = 0.9
    # Largest share of tries whose grade is not known.
    no_grade_rate: Share = 0.1
    # Largest share of tool calls that end in an error.
    tool_error_rate: Share = 0.5
    # Largest share of groups that were dropped because they were too old.
    stale_share: Share = 0.2
    # Attempts that are so many times as long, or as short, as in the run's first `window` steps.
    length_factor: float = Field(default=3.0, gt=1, le=1000)
    # Least entropy, as a share of that of the first `window` steps.
    entropy_share: float = Field(default=0.1, ge=0, lt=1)
    # Least fall of pass@1 on a set of tasks, from the best before it, that is outside chance.
    eval_fall: Share = 0.05
    # Tries in a row at one environment of which none gets a grade.
    failing_tries: Count = 16
    # Steps in a row in which no attempt in an environment got a reward other than 0.
    no_reward_steps: Steps = 3
    # Tasks of one environment that were given up, within `window` steps.
    given_up_tasks: Count = 3

    @field_validator("webhook")
    @classmethod
    def _is_a_url_or_a_variable(cls, webhook: str | None) -> str | None:
        if webhook is not None and not _WEBHOOK.fullmatch(webhook):
            # Without the value: it may be a secret with a slip in it.
            raise ValueError("expected an http(s) URL, or $NAME of an environment variable")
        return webhook
