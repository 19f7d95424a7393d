"""Price of a room for a party, and the columns that hold it in bookings and order tokens."""

import sqlite3

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.pricing import CURRENCY, Quote, count_nights, quote_price
from flotilla_environments.fleet_booking.tools.availability import Party, open_rooms
from flotilla_environments.fleet_booking.tools.discount import discount_of
from flotilla_environments.fleet_booking.tools.rows import require_row
from flotilla_environments.toolkit import ToolError


def price_room(
    db: sqlite3.Connection, room_id: int, party: Party, *, except_booking: int = 0
) -> tuple[Row, Quote]:
    """Return the room and its price. Raises `ToolError` when it is not free or too small for the
    party."""
    room = require_row(db, "rooms", room_id)
    free = open_rooms(db, party, room["hotel_id"], except_booking)
    if all(found["id"] != room_id for found in free):
        raise ToolError(
            f"room {room_id} is not free for these guests and dates: see check_availability"
        )
    nights = count_nights(party.check_in, party.check_out)
    return room, quote_price(room["base_price"], nights, party.rooms, discount_of(db).percentage)


def order_columns(db: sqlite3.Connection, room: Row, party: Party, price: Quote) -> Row:
    return {
        "hotel_id": room["hotel_id"],
        "room_id": room["id"],
        "check_in_date": party.check_in,
        "check_out_date": party.check_out,
        "adults": party.adults,
        "children": party.children,
        "room_count": party.rooms,
        "currency": CURRENCY,
        "rewards_tier": discount_of(db).tier,
        **price.columns,
    }
