"""Names of orphans: jobs, clusters and machines of this launcher without an active run. Pure.

Every resource of a launcher is named after its owner and the mark of its run (`names.py`), so the
name suffices."""

from collections.abc import Iterable

from flotilla_launcher.backends.sky import names


def is_of_launcher(name: str, owner: str) -> bool:
    """Return whether a name belongs to a job, cluster or machine of this launcher."""
    owned = names.parse_name(name)
    if owned is None:
        return False
    # A shorter owner may begin like a longer one.
    return owned.tag.startswith(owner) and len(owned.tag) == len(names.run_tag(owner, ""))


def is_of_run(name: str, owner: str, run_id: str) -> bool:
    """Return whether a name belongs to a job, cluster or machine of this run of the launcher."""
    owned = names.parse_name(name)
    return owned is not None and owned.tag == names.run_tag(owner, run_id)


def is_orphan_name(name: str, owner: str, active: Iterable[str]) -> bool:
    """Return whether a name belongs to this launcher, but to none of its active runs."""
    ours = is_of_launcher(name, owner)
    return ours and not any(is_of_run(name, owner, run_id) for run_id in active)
