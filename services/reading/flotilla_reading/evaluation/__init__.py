"""Evaluations: attempts at tasks by one policy, their scores, and two of them compared.

Start at `evaluated_attempts.py`. `results_folder.py` keeps those of `flotilla eval --model`,
`run_evaluations.py` reads those of a run; `scores.py` sums them up by environment."""
