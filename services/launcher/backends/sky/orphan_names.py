"""Names of orphans: the jobs, clusters and machines of this launcher and of no active run, pure.

Every resource of a launcher is named after its owner and the mark of its run (`names.py`), so the
name suffices."""

from collections.abc import Iterable

from services.launcher.backends.sky import names


def is_of_run(name: str, owner: str, run_id: str) -> bool:
    """Return whether a name is that of a job, cluster or machine of one run of this launcher."""
    owned = names.parse_name(name)
    return owned is not None and (owned.owner, owned.run) == (owner, names.run_mark(run_id))


def run_mark_of(name: str) -> str:
    """Return the mark of the run in a name; empty if no launcher of ours gave that name."""
    owned = names.parse_name(name)
    return "" if owned is None else owned.run


def is_orphan_name(name: str, owner: str, active: Iterable[str]) -> bool:
    """Return whether a name is this launcher's, and of none of its active runs."""
    owned = names.parse_name(name)
    if owned is None or owned.owner != owner:
        return False
    return owned.run not in {names.run_mark(run_id) for run_id in active}
