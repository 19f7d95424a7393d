"""Imitation of demonstrations: a run with `learner.objective = "sft"`.

Start at `imitation_loop.py`. `demonstration_set.py` reads what is imitated, `step_schedule.py`
decides which sequences a step takes; the stages that every run has are in `run/`."""
