"""Names of the groups of an evaluation, by which its sets of tasks are told apart. Pure."""

# The set whose results are the run's own.
MAIN_SET = "heldout"


def eval_group_id(eval_id: str, eval_set: str, number: int) -> str:
    """Return the id of the group of a set's task, which counts from 0."""
    return f"{eval_id}-{eval_set}-{number:05d}"


def eval_set_of(group_id: str, eval_id: str) -> str:
    """Return the set to which a group of an evaluation belongs."""
    return group_id.removeprefix(f"{eval_id}-").rpartition("-")[0]
