"""Hotels and bookings. A guest has bookings in several cities, a city has several hotels."""

import random
import sqlite3
from typing import Annotated, Any

from flotilla_environments.app import App, Call, DrawnTask, Row, TaskKind
from flotilla_environments.name_lists import Names
from flotilla_environments.toolkit import ToolError, define_tool, tools_by_name

SCHEMA = """
create table hotels(id integer primary key, name text not null, city text not null,
  price integer not null);
create table bookings(id integer primary key, guest text not null, city text not null,
  hotel_id integer not null references hotels(id));
"""
_ROWS = 3


def search_hotels(
    db: sqlite3.Connection,
    name: Annotated[str, "exact name of the hotel"],
    city: Annotated[str, "city of the hotel"],
) -> list[Row]:
    """Find a hotel by name and city: its id and its price a night."""
    rows = db.execute(
        "select id, name, price from hotels where name = ? and city = ?", (name, city)
    ).fetchall()
    if not rows:
        raise ToolError("not found")
    return [{"id": row[0], "name": row[1], "price": row[2]} for row in rows]


def book_room(
    db: sqlite3.Connection,
    hotel_id: Annotated[int, "id of the hotel"],
    guest: Annotated[str, "name of the guest"],
) -> dict[str, Any]:
    """Book a room in a hotel for a guest."""
    hotel = db.execute("select city from hotels where id = ?", (hotel_id,)).fetchone()
    if hotel is None:
        raise ToolError("not found")
    db.execute(
        "insert into bookings(guest, city, hotel_id) values (?, ?, ?)", (guest, hotel[0], hotel_id)
    )
    return {"ok": True}


def find_bookings(
    db: sqlite3.Connection,
    guest: Annotated[str, "name of the guest"],
    city: Annotated[str, "city of the hotel"],
) -> list[Row]:
    """Find the bookings of a guest in a city."""
    rows = db.execute(
        "select id, city from bookings where guest = ? and city = ? order by id", (guest, city)
    ).fetchall()
    if not rows:
        raise ToolError("not found")
    return [{"id": row[0], "city": row[1]} for row in rows]


def cancel_booking(
    db: sqlite3.Connection, booking_id: Annotated[int, "id of the booking"]
) -> dict[str, Any]:
    """Cancel a booking."""
    if db.execute("delete from bookings where id = ?", (booking_id,)).rowcount == 0:
        raise ToolError("not found")
    return {"ok": True}


def _draw_booking_task(names: Names, kind: str, rng: random.Random) -> DrawnTask:
    guest, city = names.draw_pair("first", "city")
    ids = names.draw_ids(3 * _ROWS)
    cities = [city] * _ROWS + names.draw_some("city", _ROWS, avoid=city)
    if kind == "cancel":
        cities[-1] = city
    prices = rng.sample(range(10, 100), 2 * _ROWS)
    hotels: list[Row] = [
        {"id": ids.pop(), "name": name, "city": where, "price": price}
        for name, where, price in zip(
            names.draw_some("hotel", 2 * _ROWS), cities, prices, strict=True
        )
    ]
    bookings: list[Row] = [
        {"id": ids.pop(), "guest": guest, "city": hotel["city"], "hotel_id": hotel["id"]}
        for hotel in hotels[_ROWS:]
    ]
    slots: dict[str, str | int] = {"city": city, "guest": guest}
    if kind == "book":
        wanted = rng.choice(hotels[:_ROWS])
        slots["hotel"] = wanted["name"]
        targets = {"hotel_id": wanted["id"]}
    else:
        targets = {"booking_id": bookings[-1]["id"]}
    return DrawnTask(slots, targets, (guest, city), {"hotels": hotels, "bookings": bookings})


def _plan_book(task: DrawnTask) -> list[Call]:
    slots = task.slots
    return [
        ("search_hotels", {"name": slots["hotel"], "city": slots["city"]}),
        ("book_room", {"hotel_id": task.targets["hotel_id"], "guest": slots["guest"]}),
    ]


def _plan_cancel(task: DrawnTask) -> list[Call]:
    slots = task.slots
    return [
        ("find_bookings", {"guest": slots["guest"], "city": slots["city"]}),
        ("cancel_booking", {"booking_id": task.targets["booking_id"]}),
    ]


BOOKING = App(
    key="booking",
    schema=SCHEMA,
    tools=tools_by_name(
        define_tool(search_hotels, read_only=True, idempotent=True),
        define_tool(book_room, read_only=False, idempotent=False),
        define_tool(find_bookings, read_only=True, idempotent=True),
        define_tool(cancel_booking, read_only=False, idempotent=False, destructive=True),
    ),
    kinds={
        "book": TaskKind(
            (
                "Book a room at the {hotel} hotel in {city} for {guest}.",
                "{guest} needs a room at the {hotel} in {city}.",
                "Please reserve the {hotel} hotel in {city} for {guest}.",
            ),
            _plan_book,
        ),
        "cancel": TaskKind(
            (
                "Cancel the booking of {guest} in {city}.",
                "{guest} does not want to go to {city}, cancel the booking.",
            ),
            _plan_cancel,
        ),
    },
    draw=_draw_booking_task,
)
