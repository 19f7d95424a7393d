"""The metrics by which runs are compared at first sight, of those in docs/metrics.md."""

SHORT_LIST = (
    "eval/all/pass_at_1",
    "eval/all/pass_at_1_low",
    "eval/all/pass_at_1_high",
    "reward/avg_pass_at_1",
    "reward/avg_raw_reward",
    "reward/variance_per_prompt",
    "policy/entropy",
    "policy/grad_norm",
    "mismatch/kl_train_infer",
    "async/staleness_mean",
    "timing/step",
    "throughput/trajectories",
    "cost/accrued",
)
