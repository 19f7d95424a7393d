"""Order of the tasks: `curriculum.py` draws the next task. `task_filter.py` says before the run
which tasks of a file it may draw, `environment_mix.py` of which environment the next one is,
`task_passes.py` which of that environment's, `difficulty.py` and `suspect_tasks.py` which ones are
left out for now."""
