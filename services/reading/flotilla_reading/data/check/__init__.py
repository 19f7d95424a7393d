"""Checks of tasks, each on its real environment, before anything is trained on them. Start with
`task_check.py`, which plays the episodes of one task; `verdicts.py` judges grades, `cheats.py`
is the table of cheating policies, and `leaks.py` finds answers that a task gives away. All but
`task_check.py` and `careless.py` are pure."""
