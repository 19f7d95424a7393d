"""The work of a rollout: leases become trajectories, and the newest weights go into the engine. A
reader starts at `worker.py`. `attempt_retries.py` says how often a failed attempt is tried again,
and after what pause. `weight_updater.py` says when the engine takes weights, the adapter
`vllm_weights.py` how."""
