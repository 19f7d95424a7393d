"""Detection of a chat template that cannot render the policy's input, as opposed to one hostile
task."""

# Groups of different tasks after which the template is to blame.
_GROUPS = 3


class TemplateFailures:
    """Groups of one start of the run that were dropped as TEMPLATE_ERROR."""

    def __init__(self, tasks: int) -> None:
        """Create it; `tasks` is the number of tasks in the run."""
        self._few = min(_GROUPS, tasks)
        self._tasks: set[str] = set()
        self._in_a_row = 0

    def note_complete(self) -> None:
        """Record a group that ended without such a failure."""
        self._in_a_row = 0

    def note_dropped(self, task: str, detail: str) -> str:
        """Record a dropped group of `task`; return why the run cannot continue, or "".

        A run of fewer tasks ends if all of them fail and no other group ended in between."""
        self._tasks.add(task)
        self._in_a_row += 1
        all_fail = len(self._tasks) >= self._few and self._in_a_row >= _GROUPS
        if len(self._tasks) < _GROUPS and not all_fail:
            return ""
        return (
            f"rollout: the policy's input cannot be rendered, in groups of"
            f" {len(self._tasks)} different tasks, the newest of task {task!r}: {detail}. Fix the"
            " chat template of policy.model, or show tool results as user messages with"
            ' rollout.dialect.name = "full"'
        )
