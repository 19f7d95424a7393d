"""The signed-in user: profile, rewards, cards and payments."""

import sqlite3
from typing import Annotated, Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.clock import NOW, TODAY
from flotilla_environments.fleet_booking.pricing import parse_date
from flotilla_environments.fleet_booking.seed.accounts import SIGNED_IN
from flotilla_environments.fleet_booking.tools import text
from flotilla_environments.fleet_booking.tools.rows import (
    insert_row,
    omit_columns,
    require_row,
    select_first,
    select_rows,
    update_row,
)
from flotilla_environments.toolkit import Tool, ToolError, define_tool, tools_by_name

_LONGEST_CARD_YEARS = 30

CardId = Annotated[int, "id of the saved card"]


def get_profile(db: sqlite3.Connection) -> dict[str, Any]:
    """The signed-in user's name, contact details, birthday, address and rewards tier."""
    rewards = select_first(db, "select * from rewards_program where user_id = ?", (SIGNED_IN,))
    return {
        **omit_columns(require_row(db, "users", SIGNED_IN), "created_at", "last_active"),
        "rewards": omit_columns(rewards or {}, "user_id", "updated_at"),
        "today": TODAY.isoformat(),
    }


def update_profile(
    db: sqlite3.Connection,
    first_name: Annotated[str | None, "new first name"] = None,
    last_name: Annotated[str | None, "new last name"] = None,
    email: Annotated[str | None, "new e-mail address"] = None,
    phone: Annotated[str | None, "new phone number with country code"] = None,
    date_of_birth: Annotated[str | None, "YYYY-MM-DD"] = None,
    country: Annotated[str | None, "new country"] = None,
    address: Annotated[str | None, "new address"] = None,
) -> dict[str, Any]:
    """Change what is given of the signed-in user's profile."""
    if date_of_birth is not None:
        parse_date(date_of_birth, "date_of_birth")
    changes = {
        "first_name": first_name,
        "last_name": last_name,
        "email": text.normalize_email(email) if email is not None else None,
        "phone": text.normalize_phone(phone) if phone is not None else None,
        "date_of_birth": date_of_birth,
        "country": country,
        "address": address,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        raise ToolError("nothing to change: give at least one field")
    taken = "select 1 from users where email = ? and id != ?"
    if db.execute(taken, (changes.get("email"), SIGNED_IN)).fetchone():
        raise ToolError("another account has that e-mail address")
    update_row(db, "users", SIGNED_IN, changes)
    return get_profile(db)


def list_payment_methods(db: sqlite3.Connection) -> list[Row]:
    """The signed-in user's saved cards; numbers are not shown, only their last four digits."""
    return select_rows(
        db,
        """select id, card_type, last_four, expiry_month, expiry_year, cardholder_name,
             billing_address, billing_postal_code, is_default
           from payment_methods where user_id = ? and is_saved_for_reuse = 1 order by id""",
        (SIGNED_IN,),
    )


def add_payment_method(
    db: sqlite3.Connection,
    card_number: Annotated[str, "number of the card"],
    expiry_month: Annotated[int, "1 to 12"],
    expiry_year: Annotated[int, "four digits"],
    cardholder_name: Annotated[str, "name on the card"],
    cvv: Annotated[str | None, "security code"] = None,
    billing_address: Annotated[str | None, "address of the card's owner"] = None,
    billing_postal_code: Annotated[str | None, "postal code of the card's owner"] = None,
    card_type: Annotated[str | None, "brand; by default that of the number"] = None,
    save_for_reuse: Annotated[bool, "false: for one booking only"] = True,
    make_default: Annotated[bool, "whether to pay with it by default"] = False,
) -> dict[str, Any]:
    """Add a card to pay with."""
    _check_expiry(expiry_month, expiry_year)
    digits = [character for character in card_number if character.isdigit()]
    if len(digits) < 12:
        raise ToolError("card_number must have at least 12 digits")
    row: Row = {
        "user_id": SIGNED_IN,
        "card_type": card_type or text.card_brand(card_number),
        "last_four": "".join(digits[-4:]),
        "expiry_month": expiry_month,
        "expiry_year": expiry_year,
        "billing_address": billing_address,
        "billing_postal_code": billing_postal_code,
        "is_default": 0,
        "is_saved_for_reuse": int(save_for_reuse),
        "card_number": text.normalize_card_number(card_number),
        "cvv": cvv,
        "cardholder_name": cardholder_name,
        "created_at": NOW,
    }
    card_id = insert_row(db, "payment_methods", row)
    if make_default:
        set_default_payment_method(db, card_id)
    return {"payment_method_id": card_id, "card_type": row["card_type"]}


def _check_expiry(month: int, year: int) -> None:
    if not 1 <= month <= 12:
        raise ToolError("expiry_month must be 1 to 12")
    if not TODAY.year <= year < TODAY.year + _LONGEST_CARD_YEARS:
        raise ToolError("expiry_year must have four digits, and the card must not have expired")
    if (year, month) < (TODAY.year, TODAY.month):
        raise ToolError("the card has expired")


def set_default_payment_method(db: sqlite3.Connection, payment_method_id: CardId) -> dict[str, Any]:
    """Make a card the default one."""
    require_row(db, "payment_methods", payment_method_id, own=True)
    db.execute(
        "update payment_methods set is_default = (id = ?) where user_id = ?",
        (payment_method_id, SIGNED_IN),
    )
    return {"ok": True}


def delete_payment_method(db: sqlite3.Connection, payment_method_id: CardId) -> dict[str, Any]:
    """Remove a card. Bookings that name it keep their payments."""
    require_row(db, "payment_methods", payment_method_id, own=True)
    db.execute("delete from payment_methods where id = ?", (payment_method_id,))
    return {"ok": True}


def list_transactions(
    db: sqlite3.Connection,
    booking_id: Annotated[int | None, "of this booking only"] = None,
) -> list[Row]:
    """The signed-in user's payments and refunds, with the gateway's ids and dates."""
    return select_rows(
        db,
        """select transactions.* from transactions join bookings on bookings.id = booking_id
           where user_id = ? and (? is null or booking_id = ?) order by transactions.id""",
        (SIGNED_IN, booking_id, booking_id),
    )


TOOLS: dict[str, Tool] = tools_by_name(
    define_tool(get_profile, read_only=True, idempotent=True),
    define_tool(update_profile, read_only=False, idempotent=True),
    define_tool(list_payment_methods, read_only=True, idempotent=True),
    define_tool(add_payment_method, read_only=False, idempotent=False),
    define_tool(set_default_payment_method, read_only=False, idempotent=True),
    define_tool(delete_payment_method, read_only=False, idempotent=False, destructive=True),
    define_tool(list_transactions, read_only=True, idempotent=True),
)
