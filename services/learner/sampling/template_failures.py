"""Detection of a chat template that cannot show the policy what it should read, as opposed to
one hostile task."""

# Groups, of different tasks, after which it is the template.
_GROUPS = 3


class TemplateFailures:
    """Groups of one start of the run that were dropped as TEMPLATE_ERROR."""

    def __init__(self, tasks: int) -> None:
        """Create it; `tasks` is how many the run has."""
        self._few = min(_GROUPS, tasks)
        self._tasks: set[str] = set()
        self._in_a_row = 0

    def note_complete(self) -> None:
        """Note a group that ended without one."""
        self._in_a_row = 0

    def note_dropped(self, task: str, detail: str) -> str:
        """Note a dropped group of `task`; return why the run cannot go on, or nothing.

        A run of fewer tasks ends when all of them fail, and nothing else was played in between."""
        self._tasks.add(task)
        self._in_a_row += 1
        all_fail = len(self._tasks) >= self._few and self._in_a_row >= _GROUPS
        if len(self._tasks) < _GROUPS and not all_fail:
            return ""
        return (
            f"rollout: what the policy should read cannot be rendered, in groups of"
            f" {len(self._tasks)} different tasks, the newest of task {task!r}: {detail}. Mend the"
            " chat template of policy.model, or show tool results as user messages with"
            ' rollout.dialect.name = "full"'
        )
