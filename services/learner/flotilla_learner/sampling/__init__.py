"""Order of the tasks: `curriculum.py` draws the next task. Before the run, `task_filter.py` selects
the tasks of a file that it may draw. `environment_mix.py` chooses the environment of the next draw,
`task_passes.py` the task in it, and `difficulty.py` and `suspect_tasks.py` exclude tasks for
now."""
