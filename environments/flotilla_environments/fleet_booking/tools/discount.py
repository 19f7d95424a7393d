"""Discount of the rewards programme."""

import sqlite3
from dataclasses import dataclass

from flotilla_environments.fleet_booking.seed.accounts import SIGNED_IN
from flotilla_environments.fleet_booking.tools.rows import select_first


@dataclass(frozen=True)
class Discount:
    tier: str | None
    percentage: float


def discount_of(db: sqlite3.Connection) -> Discount:
    row = select_first(db, "select * from rewards_program where user_id = ?", (SIGNED_IN,))
    return Discount(row["tier"], row["discount_percentage"]) if row else Discount(None, 0.0)
