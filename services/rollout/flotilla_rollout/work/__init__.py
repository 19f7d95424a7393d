"""The work of a rollout: leases become trajectories, and the newest weights go into the engine.
Start reading at `worker.py`. `weight_updater.py` decides when the engine takes weights; the adapter
`vllm_weights.py` loads them."""
