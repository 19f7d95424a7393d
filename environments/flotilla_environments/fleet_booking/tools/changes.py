"""Changing and cancelling bookings."""

import sqlite3
from datetime import date
from typing import Annotated, Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.clock import NOW, TODAY
from flotilla_environments.fleet_booking.tools.availability import Party
from flotilla_environments.fleet_booking.tools.orders import price_room
from flotilla_environments.fleet_booking.tools.rows import (
    insert_row,
    require_row,
    select_first,
    update_row,
)
from flotilla_environments.toolkit import Tool, ToolError, define_tool, tools_by_name

BookingId = Annotated[int, "id of the booking"]
_OPEN = ("confirmed", "pending")
# Share of the price that is kept, by policy, when the stay is near, and how many days near is.
_PENALTIES = {"Flexible": (0.0, 0), "Moderate": (0.5, 5), "Strict": (0.5, 30)}


def modify_booking(
    db: sqlite3.Connection,
    booking_id: BookingId,
    check_in_date: Annotated[str | None, "YYYY-MM-DD"] = None,
    check_out_date: Annotated[str | None, "YYYY-MM-DD"] = None,
    room_id: Annotated[int | None, "another kind of room, in this or another hotel"] = None,
    room_count: Annotated[int | None, "how many rooms"] = None,
    adults: Annotated[int | None, "guests who are adults"] = None,
    children: Annotated[int | None, "guests who are children"] = None,
    special_requests: Annotated[str | None, "what the hotel should know"] = None,
    rooms_close_together: Annotated[bool | None, "ask for rooms close to each other"] = None,
    payment_method_id: Annotated[int | None, "pay with this card from now on"] = None,
) -> dict[str, Any]:
    """Change what is given of a booking; another stay or room is priced anew, and settled there."""
    booking = _open_booking(db, booking_id)
    if payment_method_id is not None:
        require_row(db, "payment_methods", payment_method_id, own=True)
    close = None if rooms_close_together is None else int(rooms_close_together)
    stay_changes = {
        "check_in_date": check_in_date,
        "check_out_date": check_out_date,
        "room_id": room_id,
        "room_count": room_count,
        "adults": adults,
        "children": children,
    }
    others = {
        "special_requests": special_requests,
        "rooms_close_together": close,
        "payment_method_id": payment_method_id,
    }
    changes = _drop_none({**stay_changes, **others})
    if not changes:
        raise ToolError("nothing to change: give at least one field")
    if _drop_none(stay_changes):
        changes = {**changes, **_reprice_stay(db, {**booking, **changes})}
    update_row(db, "bookings", booking_id, {**changes, "updated_at": NOW})
    return require_row(db, "bookings", booking_id)


def cancel_booking(
    db: sqlite3.Connection,
    booking_id: BookingId,
    reason: Annotated[str | None, "why"] = None,
) -> dict[str, Any]:
    """Cancel a booking. What was paid comes back, less what the hotel's policy keeps."""
    booking = _open_booking(db, booking_id)
    paid = booking["total_price"] if booking["payment_status"] == "paid" else 0.0
    penalty = round(paid * _penalty_share(db, booking), 2)
    payment_status = "refunded" if paid else booking["payment_status"]
    update_row(
        db,
        "bookings",
        booking_id,
        {"status": "cancelled", "payment_status": payment_status, "updated_at": NOW},
    )
    row: Row = {
        "booking_id": booking_id,
        "cancelled_by": "Guest",
        "cancellation_date": NOW,
        "reason": reason,
        "refund_amount": round(paid - penalty, 2),
        "penalty_amount": penalty,
        "refund_status": "Processed" if paid else "Not applicable",
        "created_at": NOW,
    }
    return {"cancellation_id": insert_row(db, "cancellations", row), **row}


def _open_booking(db: sqlite3.Connection, booking_id: int) -> Row:
    booking = require_row(db, "bookings", booking_id, own=True)
    if booking["status"] not in _OPEN:
        raise ToolError(f"booking {booking_id} is {booking['status']} and cannot be changed")
    return booking


def _reprice_stay(db: sqlite3.Connection, wanted: Row) -> Row:
    """Price the changed stay and return its columns. Raises `ToolError` when there is no room."""
    party = Party.from_request(
        wanted["adults"],
        wanted["children"],
        wanted["room_count"],
        wanted["check_in_date"],
        wanted["check_out_date"],
    )
    room, price = price_room(db, wanted["room_id"], party, except_booking=wanted["id"])
    return {"hotel_id": room["hotel_id"], **price.columns}


def _penalty_share(db: sqlite3.Connection, booking: Row) -> float:
    policy = select_first(
        db,
        "select cancellation_policy_type from property_policies where hotel_id = ?",
        (booking["hotel_id"],),
    )
    kind = policy["cancellation_policy_type"] if policy else "Flexible"
    share, near = _PENALTIES.get(kind, (1.0, 10_000))
    days = (date.fromisoformat(booking["check_in_date"]) - TODAY).days
    return share if days < near else 0.0


def _drop_none(changes: Row) -> Row:
    return {name: value for name, value in changes.items() if value is not None}


TOOLS: dict[str, Tool] = tools_by_name(
    define_tool(modify_booking, read_only=False, idempotent=True),
    define_tool(cancel_booking, read_only=False, idempotent=False, destructive=True),
)
