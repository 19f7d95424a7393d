"""Imitation of demonstrations: runs with `learner.objective = "sft"` or `[learner.warm_start]`.

Start at `imitation_loop.py`; `warm_start.py` lets reinforcement learning follow.
`demonstration_set.py` reads what is imitated, `step_schedule.py` decides which sequences a step
takes; the stages that every run has are in `run/`."""
