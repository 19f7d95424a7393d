"""The work of a rollout: leases become trajectories, and the newest weights go into the engine. A
reader starts at `worker.py`. `weight_updater.py` says when the engine takes weights, the adapter
`vllm_weights.py` how."""
