"""Names of orphans: jobs, clusters and machines of this launcher without an active run. Pure.

Every resource of a launcher is named after its owner and the mark of its run (`names.py`), so the
name suffices."""

from collections.abc import Iterable

from flotilla_launcher.backends.sky import names


def is_of_run(name: str, owner: str, run_id: str) -> bool:
    """Return whether a name belongs to a job, cluster or machine of this run of the launcher."""
    owned = names.parse_name(name)
    return owned is not None and (owned.owner, owned.run) == (owner, names.run_mark(owner, run_id))


def run_mark_of(name: str) -> str:
    """Return the mark of the run in a name; "" if no launcher of ours made it."""
    owned = names.parse_name(name)
    return "" if owned is None else owned.run


def is_orphan_name(name: str, owner: str, active: Iterable[str]) -> bool:
    """Return whether a name belongs to this launcher, but to none of its active runs."""
    owned = names.parse_name(name)
    if owned is None or owned.owner != owner:
        return False
    return owned.run not in {names.run_mark(owner, run_id) for run_id in active}
