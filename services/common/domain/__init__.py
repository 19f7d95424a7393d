"""What rollout, learner and env_gateway call by one name: policies, attempts, trajectories.

Plain values and arrays, never protobuf. Start at `trajectory.py`."""
