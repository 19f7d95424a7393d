"""Rows of `pictures`: the files that a group's trajectories show, each once for the group.

A file is compared with its hash whenever it is read."""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.run_folder.trajectory_tables import trajectories_of

_BY_HASH = "WHERE group_id = ? AND sha256 = ?"


class PictureMissingError(Exception):
    """A trajectory shows a picture that neither came with it nor is journaled for its group."""


def put_pictures(db: sqlite3.Connection, trajectory: Trajectory) -> None:
    """Keep the pictures that a trajectory shows unless they are known.

    Raises PictureMissingError, or ValueError if a known one is shown with another grid."""
    group = trajectory.key.group_id
    shown = [(p.sha256, json.dumps(p.grid)) for each in trajectory.sequences for p in each.pictures]
    for sha256, grid in dict.fromkeys(shown):
        known = db.execute(f"SELECT grid FROM pictures {_BY_HASH}", (group, sha256)).fetchone()
        if known is None:
            if (data := trajectory.pictures.get(sha256)) is None:
                raise PictureMissingError(
                    f"picture {sha256[:12]} is not journaled for group {group}: send the trajectory"
                    " again with all of its pictures"
                )
            db.execute("INSERT INTO pictures VALUES (?, ?, ?, ?)", (group, sha256, grid, data))
        elif known[0] != grid:
            raise ValueError(
                f"picture {sha256[:12]} has grid {grid}, but {known[0]} in other trajectories of"
                " its group"
            )


def picture_of(db: sqlite3.Connection, group_id: str, sha256: str) -> bytes | None:
    """Return the file of a picture; None if it is gone or damaged."""
    row = db.execute(f"SELECT data FROM pictures {_BY_HASH}", (group_id, sha256)).fetchone()
    return row[0] if row and hashlib.sha256(row[0]).hexdigest() == sha256 else None


def add_pictures(
    db: sqlite3.Connection, trajectories: Iterable[Trajectory]
) -> tuple[list[Trajectory], list[AttemptKey]]:
    """Return trajectories with the files of their pictures, in order, and the keys of those of
    which a file is gone or damaged. The trajectories of a group share its files."""
    read: dict[tuple[str, str], bytes | None] = {}
    found: list[Trajectory] = []
    lacking: list[AttemptKey] = []
    for each in trajectories:
        group, files = each.key.group_id, dict[str, bytes]()
        for sha256 in each.shown_pictures:
            if (group, sha256) not in read:
                read[group, sha256] = picture_of(db, group, sha256)
            if (data := read[group, sha256]) is not None:
                files[sha256] = data
        if len(files) < len(each.shown_pictures):
            lacking.append(each.key)
        else:
            found.append(replace(each, pictures=files) if files else each)
    return found, lacking


def whole_trajectories_of(
    db: sqlite3.Connection, keys: Sequence[AttemptKey]
) -> tuple[list[Trajectory], list[AttemptKey]]:
    """Return the intact trajectories with the files of their pictures, in order, and the keys of
    the others."""
    found, damaged = trajectories_of(db, keys)
    found, lacking = add_pictures(db, found)
    return found, damaged + lacking
