"""Free rooms, by party and dates."""

import math
import sqlite3
from dataclasses import dataclass

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.clock import TODAY
from flotilla_environments.fleet_booking.pricing import count_nights, parse_date
from flotilla_environments.fleet_booking.tools.rows import select_rows
from flotilla_environments.toolkit import ToolError


@dataclass(frozen=True)
class Party:
    """Guests, the rooms that they want, and their dates; without dates, any time will do."""

    adults: int
    children: int
    rooms: int
    check_in: str = ""
    check_out: str = ""

    @classmethod
    def from_request(
        cls, adults: int, children: int, rooms: int, check_in: str | None, check_out: str | None
    ) -> "Party":
        """Create a party. Raises `ToolError` for numbers or dates that cannot be booked."""
        if adults < 1 or children < 0 or rooms < 1:
            raise ToolError("adults and rooms must be at least 1, children at least 0")
        if (check_in is None) != (check_out is None):
            raise ToolError("give both check_in_date and check_out_date, or neither")
        if check_in is None or check_out is None:
            return cls(adults, children, rooms)
        count_nights(check_in, check_out)
        if parse_date(check_in, "check_in_date") < TODAY:
            raise ToolError(f"check_in_date is in the past: today is {TODAY.isoformat()}")
        return cls(adults, children, rooms, check_in, check_out)

    def fits_into(self, room: Row) -> bool:
        """Return True when the rooms take the party, spread evenly over them."""
        adults = math.ceil(self.adults / self.rooms)
        children = math.ceil(self.children / self.rooms)
        return (
            room["adults_capacity"] >= adults
            and room["children_capacity"] >= children
            and room["free"] >= self.rooms
        )


def open_rooms(
    db: sqlite3.Connection, party: Party, hotel_id: int | None = None, except_booking: int = 0
) -> list[Row]:
    """Rooms that the party can book, with `free`: how many are left on every night.

    `except_booking` is one whose own rooms count as free: it is about to be changed.
    """
    rooms = select_rows(
        db,
        """select rooms.*, available_count - coalesce((
             select sum(room_count) from bookings
             where room_id = rooms.id and status in ('confirmed', 'pending') and id != ?
               and check_in_date < ? and check_out_date > ?), 0) as free
           from rooms where ? is null or hotel_id = ? order by base_price, id""",
        (except_booking, party.check_out, party.check_in, hotel_id, hotel_id),
    )
    return [room for room in rooms if party.fits_into(room)]
