"""Settings of the mismatch guard: `[learner.guard]`. See docs/mismatch.md."""

from typing import Literal

from pydantic import Field

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import MOST_STEPS, MOST_TOKENS, Steps, Tokens


class GuardConfig(ConfigModel):
    """Limits on the mismatch between engine and trainer, and the measures against it."""

    # `warn` reports what `enforce` would act on; `off` compares only canaries.
    mode: Literal["enforce", "warn", "off"] = "enforce"
    # Policy tokens of the first batch that are scored again before any training, ...
    start_tokens: Tokens = 8192
    # ... and of each later batch; 0 disables the watch after the start.
    audit_tokens: int = Field(default=2048, ge=0, le=MOST_TOKENS)
    # Largest mean and 99.9 % quantile of |difference of logprobs|, and largest KL, of any
    # version. Absent: the bounds for policy.dtype.
    mean_bound: float | None = Field(default=None, gt=0, le=1000)
    tail_bound: float | None = Field(default=None, gt=0, le=1000)
    kl_bound: float | None = Field(default=None, gt=0, le=1000)
    # The run's own limit: this many standard deviations above the moving average of healthy
    # versions, in logarithms, ...
    sigmas: float = Field(default=4.0, gt=0, le=1000)
    # ... in which each new version has this weight, ...
    smoothing: float = Field(default=0.1, gt=0, le=1)
    # ... applied once this many versions are known, ...
    warmup_versions: int = Field(default=8, ge=2, le=MOST_STEPS)
    # ... and never below this share of the bound.
    floor: float = Field(default=0.25, gt=0, le=1)
    # Over a limit, tokens whose ratio lies outside [1 / x, x] get no gradient.
    ratio_limit: float = Field(default=2.0, gt=1, le=1e6)
    # Consecutive healthy versions after which a measure is lifted.
    healthy_versions: Steps = 5
