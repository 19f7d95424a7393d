"""Booking: see, hold, make, pay."""

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Annotated, Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.clock import NOW, TOKEN_EXPIRES
from flotilla_environments.fleet_booking.seed.accounts import SIGNED_IN
from flotilla_environments.fleet_booking.tools import text
from flotilla_environments.fleet_booking.tools.availability import Party
from flotilla_environments.fleet_booking.tools.orders import order_columns, price_room
from flotilla_environments.fleet_booking.tools.rows import (
    insert_row,
    require_row,
    select_rows,
    update_row,
)
from flotilla_environments.toolkit import Tool, ToolError, define_tool, tools_by_name

BookingId = Annotated[int, "id of the booking"]
RoomId = Annotated[int, "id of the kind of room, from check_availability"]
CheckIn = Annotated[str, "YYYY-MM-DD"]
CheckOut = Annotated[str, "YYYY-MM-DD"]
Adults = Annotated[int, "guests who are adults, in all rooms together"]
Children = Annotated[int, "guests who are children, in all rooms together"]
Rooms = Annotated[int, "how many rooms of this kind"]
_GUEST = (
    "guest_first_name",
    "guest_last_name",
    "guest_email",
    "guest_phone_country_code",
    "guest_phone_number",
)
_PENDING: Row = {
    "user_id": SIGNED_IN,
    "booking_date": NOW,
    "status": "pending",
    "payment_status": "pending",
    "created_at": NOW,
    "updated_at": NOW,
}


def list_bookings(
    db: sqlite3.Connection,
    status: Annotated[str | None, "confirmed, pending, cancelled, completed or no_show"] = None,
) -> list[Row]:
    """The signed-in user's bookings with hotel and room, latest stay first."""
    return select_rows(
        db,
        """select bookings.*, hotels.name as hotel_name, hotels.city, rooms.room_type
           from bookings join hotels on hotels.id = bookings.hotel_id
             join rooms on rooms.id = room_id
           where user_id = ? and (? is null or status = ?) order by check_in_date desc""",
        (SIGNED_IN, status, status),
    )


def preview_booking(
    db: sqlite3.Connection,
    room_id: RoomId,
    check_in_date: CheckIn,
    check_out_date: CheckOut,
    adults: Adults,
    children: Children = 0,
    room_count: Rooms = 1,
) -> dict[str, Any]:
    """What a booking would cost; holds that price for half an hour."""
    party = Party.from_request(adults, children, room_count, check_in_date, check_out_date)
    room, price = price_room(db, room_id, party)
    row = order_columns(db, room, party, price)
    number = db.execute("select count(*) from order_tokens").fetchone()[0]
    token = hashlib.sha256(f"{number}/{sorted(row.items())}".encode()).hexdigest()[:32]
    held = {**row, "user_id": SIGNED_IN, "token": token, "expires_at": TOKEN_EXPIRES}
    insert_row(db, "order_tokens", {**held, "created_at": NOW})
    return {**row, "order_token": token}


def create_booking(
    db: sqlite3.Connection,
    room_id: RoomId,
    check_in_date: CheckIn,
    check_out_date: CheckOut,
    adults: Adults,
    children: Children = 0,
    room_count: Rooms = 1,
    guest_first_name: Annotated[str | None, "by default, the signed-in user's"] = None,
    guest_last_name: Annotated[str | None, "by default, the signed-in user's"] = None,
    guest_email: Annotated[str | None, "by default, the signed-in user's"] = None,
    guest_phone_country_code: Annotated[str | None, "such as +1"] = None,
    guest_phone_number: Annotated[str | None, "without the country code"] = None,
    special_requests: Annotated[str | None, "what the hotel should know"] = None,
    purpose_of_trip: Annotated[str, "Leisure or Business"] = "Leisure",
    rooms_close_together: Annotated[bool, "ask for rooms that are close to each other"] = False,
) -> dict[str, Any]:
    """Reserve rooms. The booking is pending until it is paid with pay_booking."""
    if purpose_of_trip not in ("Leisure", "Business"):
        raise ToolError("purpose_of_trip must be Leisure or Business")
    party = Party.from_request(adults, children, room_count, check_in_date, check_out_date)
    room, price = price_room(db, room_id, party)
    contact = (
        guest_first_name,
        guest_last_name,
        guest_email,
        guest_phone_country_code,
        guest_phone_number,
    )
    row = {
        **order_columns(db, room, party, price),
        **_guest_columns(db, contact),
        **_PENDING,
        "special_requests": special_requests,
        "purpose_of_trip": purpose_of_trip,
        "rooms_close_together": int(rooms_close_together),
    }
    row["booking_reference"] = _make_reference(db, row)
    booking_id = insert_row(db, "bookings", row)
    return {"booking_id": booking_id, **require_row(db, "bookings", booking_id)}


def pay_booking(
    db: sqlite3.Connection,
    booking_id: BookingId,
    payment_method_id: Annotated[int, "id of one of the user's cards"],
    agree_to_terms: Annotated[bool, "the user accepts the terms and conditions"],
    agree_to_marketing: Annotated[bool, "the user wants news and offers"] = False,
) -> dict[str, Any]:
    """Pay for a pending booking, which confirms it."""
    booking = require_row(db, "bookings", booking_id, own=True)
    require_row(db, "payment_methods", payment_method_id, own=True)
    if booking["status"] != "pending":
        raise ToolError(f"booking {booking_id} is {booking['status']}: only a pending one is paid")
    if not agree_to_terms:
        raise ToolError("a booking needs agree_to_terms")
    changes: Row = {
        "status": "confirmed",
        "payment_status": "paid",
        "payment_method_id": payment_method_id,
        "agreed_to_terms": 1,
        "agreed_to_terms_at": NOW,
        "agreed_to_marketing": int(agree_to_marketing),
        "agreed_to_marketing_at": NOW if agree_to_marketing else None,
        "updated_at": NOW,
    }
    update_row(db, "bookings", booking_id, changes)
    payment: Row = {
        "booking_id": booking_id,
        "payment_method_id": payment_method_id,
        "amount": booking["total_price"],
        "currency": booking["currency"],
        "transaction_type": "Payment",
        "status": "Success",
        "processed_at": NOW,
    }
    return {
        "status": "confirmed",
        "booking_reference": booking["booking_reference"],
        "transaction_id": insert_row(db, "transactions", payment),
        "amount": booking["total_price"],
    }


def _guest_columns(db: sqlite3.Connection, contact: Sequence[str | None]) -> Row:
    """Fill the guest's columns with the contact given, else with the signed-in user's."""
    user = require_row(db, "users", SIGNED_IN)
    number = user["phone"] or ""
    # The account keeps one number; ten digits are the subscriber's, what is before is the country.
    own = (user["first_name"], user["last_name"], user["email"], number[:-10], number[-10:])
    columns = {
        name: mine if given is None else given
        for name, given, mine in zip(_GUEST, contact, own, strict=True)
    }
    columns["guest_email"] = text.normalize_email(columns["guest_email"])
    columns["guest_phone_number"] = text.normalize_phone(columns["guest_phone_number"])
    return {**columns, "guest_country": user["country"]}


def _make_reference(db: sqlite3.Connection, row: Row) -> str:
    """Make ten letters and digits that look drawn, and are the same for the same calls."""
    number = db.execute("select coalesce(max(id), 0) from bookings").fetchone()[0]
    digest = hashlib.sha256(f"{number}/{row['room_id']}/{row['check_in_date']}".encode())
    return "BK" + digest.hexdigest()[:10].upper()


TOOLS: dict[str, Tool] = tools_by_name(
    define_tool(list_bookings, read_only=True, idempotent=True),
    define_tool(preview_booking, read_only=False, idempotent=False),
    define_tool(create_booking, read_only=False, idempotent=False),
    define_tool(pay_booking, read_only=False, idempotent=False),
)
