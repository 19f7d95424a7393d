"""Types that rollout, learner and env_gateway share: policies, attempts, trajectories.

Plain values and arrays, never protobuf. Start at `trajectory.py`; `messages.py` is what was said in
it, and `token_authors.py` decides which tokens are trained."""
