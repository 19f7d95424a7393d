"""Statistics of evaluations that need scipy: `paired.py` compares two sets of attempts on the same
tasks. The interval of a mean over tasks is in `common/domain/task_means.py`, for services too."""
