"""The signed-in user's wishlists and what is saved in them."""

import sqlite3
from typing import Annotated, Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.clock import NOW
from flotilla_environments.fleet_booking.seed.accounts import SIGNED_IN
from flotilla_environments.fleet_booking.tools.rows import insert_row, require_row, select_rows
from flotilla_environments.toolkit import Tool, ToolError, define_tool, tools_by_name

ListName = Annotated[str, "name of the wishlist"]
HotelId = Annotated[int, "id of the hotel"]
_USER = str(SIGNED_IN)  # wishlist_lists keeps the user as text


def list_wishlists(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """All wishlists with the hotels in them and the notes on these."""
    lists = select_rows(
        db,
        "select list_name, created_at from wishlist_lists where user_id = ? order by created_at",
        (_USER,),
    )
    return [{**row, "hotels": _saved_hotels(db, row["list_name"])} for row in lists]


def create_wishlist(db: sqlite3.Connection, list_name: ListName) -> dict[str, Any]:
    """Make a new, empty wishlist."""
    if not list_name.strip():
        raise ToolError("list_name must not be empty")
    if _wishlist_exists(db, list_name):
        raise ToolError(f"wishlist {list_name!r} exists already")
    insert_row(db, "wishlist_lists", {"user_id": _USER, "list_name": list_name, "created_at": NOW})
    return {"ok": True}


def rename_wishlist(
    db: sqlite3.Connection, list_name: ListName, new_name: Annotated[str, "its new name"]
) -> dict[str, Any]:
    """Give a wishlist another name; hotels and notes stay in it."""
    _require_wishlist(db, list_name)
    if not new_name.strip():
        raise ToolError("new_name must not be empty")
    if _wishlist_exists(db, new_name):
        raise ToolError(f"wishlist {new_name!r} exists already")
    for table, user in (("wishlist_lists", _USER), ("saved_properties", SIGNED_IN)):
        db.execute(
            f"update {table} set list_name = ? where user_id = ? and list_name = ?",
            (new_name, user, list_name),
        )
    return {"ok": True}


def delete_wishlist(db: sqlite3.Connection, list_name: ListName) -> dict[str, Any]:
    """Delete a wishlist with all that is saved in it."""
    _require_wishlist(db, list_name)
    for table, user in (("wishlist_lists", _USER), ("saved_properties", SIGNED_IN)):
        db.execute(f"delete from {table} where user_id = ? and list_name = ?", (user, list_name))
    return {"ok": True}


def save_property(
    db: sqlite3.Connection,
    hotel_id: HotelId,
    list_name: ListName,
    notes: Annotated[str | None, "a note on the hotel"] = None,
) -> dict[str, Any]:
    """Save a hotel in a wishlist, which must exist."""
    require_row(db, "hotels", hotel_id)
    _require_wishlist(db, list_name)
    if any(hotel["hotel_id"] == hotel_id for hotel in _saved_hotels(db, list_name)):
        raise ToolError(f"hotel {hotel_id} is in {list_name!r} already")
    row: Row = {
        "user_id": SIGNED_IN,
        "hotel_id": hotel_id,
        "list_name": list_name,
        "notes": notes,
        "saved_at": NOW,
    }
    insert_row(db, "saved_properties", row)
    return {"ok": True}


def update_saved_property(
    db: sqlite3.Connection,
    hotel_id: HotelId,
    list_name: ListName,
    notes: Annotated[str, "the new note"],
) -> dict[str, Any]:
    """Change the note on a saved hotel."""
    changed = db.execute(
        """update saved_properties set notes = ?
           where user_id = ? and hotel_id = ? and list_name = ?""",
        (notes, SIGNED_IN, hotel_id, list_name),
    )
    if changed.rowcount == 0:
        raise ToolError(f"hotel {hotel_id} is not in {list_name!r}")
    return {"ok": True}


def remove_saved_property(
    db: sqlite3.Connection,
    hotel_id: HotelId,
    list_name: Annotated[str | None, "by default, all wishlists"] = None,
) -> dict[str, Any]:
    """Take a hotel out of a wishlist, or out of all of them."""
    gone = db.execute(
        """delete from saved_properties
           where user_id = ? and hotel_id = ? and (? is null or list_name = ?)""",
        (SIGNED_IN, hotel_id, list_name, list_name),
    )
    if gone.rowcount == 0:
        raise ToolError(f"hotel {hotel_id} is not saved there")
    return {"removed": gone.rowcount}


def _wishlist_exists(db: sqlite3.Connection, list_name: str) -> bool:
    sql = "select 1 from wishlist_lists where user_id = ? and list_name = ?"
    return db.execute(sql, (_USER, list_name)).fetchone() is not None


def _require_wishlist(db: sqlite3.Connection, list_name: str) -> None:
    if not _wishlist_exists(db, list_name):
        raise ToolError(f"wishlist {list_name!r} not found: create it first")


def _saved_hotels(db: sqlite3.Connection, list_name: str) -> list[Row]:
    return select_rows(
        db,
        """select hotel_id, name, city, property_type, notes, saved_at
           from saved_properties join hotels on hotels.id = hotel_id
           where user_id = ? and list_name = ? order by saved_at, hotel_id""",
        (SIGNED_IN, list_name),
    )


TOOLS: dict[str, Tool] = tools_by_name(
    define_tool(list_wishlists, read_only=True, idempotent=True),
    define_tool(create_wishlist, read_only=False, idempotent=False),
    define_tool(rename_wishlist, read_only=False, idempotent=False),
    define_tool(delete_wishlist, read_only=False, idempotent=False, destructive=True),
    define_tool(save_property, read_only=False, idempotent=False),
    define_tool(update_saved_property, read_only=False, idempotent=True),
    define_tool(remove_saved_property, read_only=False, idempotent=False, destructive=True),
)
