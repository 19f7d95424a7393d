"""Audit of a run's invariants, from its journal alone:

    python -m flotilla_learner.journal.audit runs/RUN_ID/journal.sqlite

I1: no attempt is in two steps. I2: every acknowledged trajectory was trained, evaluated, failed,
dropped with a reason, or waits."""

import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flotilla_common.run_folder.journal_file import JournalError, open_read_only
from flotilla_common.run_folder.picture_tables import whole_trajectories_of
from flotilla_common.run_folder.trajectory_tables import keys_of
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_learner.journal.plan_tables import plans_after
from flotilla_learner.journal.row_codec import count_fates


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of auditing one journal."""

    # Trajectories in the journal, and their fates, which sum to it.
    acknowledged: int
    fates: dict[str, int]
    # Attempts, as [group, index], that plans contain more than once.
    twice: list[tuple[str, int]]
    # Attempts in a plan whose trajectory is missing from the journal.
    unknown: list[tuple[str, int]]
    # Trajectories that differ from what was written, or of which a picture does.
    damaged: int

    @property
    def holds(self) -> bool:
        """True if both invariants, I1 and I2, hold."""
        balanced = sum(self.fates.values()) == self.acknowledged
        return balanced and not self.twice and not self.unknown and not self.damaged


def audit_journal(db: sqlite3.Connection) -> Audit:
    """Audit the whole journal; the run may still be running."""
    fates = count_fates(db)
    acknowledged = fates.pop("acknowledged")
    groups = [group for (group,) in db.execute("SELECT DISTINCT group_id FROM trajectories")]
    of_group = [keys_of(db, group) for group in groups]
    keys = [key for some in of_group for key in some]
    planned = [key for plan in plans_after(db, 0) for key in plan.attempts]
    times = Counter((key.group_id, key.attempt_index) for key in planned)
    known = set(keys)
    return Audit(
        acknowledged,
        fates,
        twice=[attempt for attempt, count in times.items() if count > 1],
        unknown=[(key.group_id, key.attempt_index) for key in planned if key not in known],
        damaged=sum(len(whole_trajectories_of(db, some)[1]) for some in of_group),
    )


def main(argv: Sequence[str]) -> int:
    """Return 0 if the invariants hold, 1 if they do not, 2 if the journal cannot be read."""
    if len(argv) != 1:
        print_visible(__doc__ or "", file=sys.stderr)
        return 2
    try:
        with open_read_only(Path(argv[0])) as db:
            found = audit_journal(db)
    except JournalError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return 2
    print_json({**asdict(found), "holds": found.holds})
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
