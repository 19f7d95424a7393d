"""Customers, items and orders; an order needs the id of both."""

import random
import sqlite3
from typing import Annotated, Any

from flotilla_environments.app import App, Call, DrawnTask, Row, TaskKind
from flotilla_environments.name_lists import Names
from flotilla_environments.toolkit import ToolError, define_tool, tools_by_name

SCHEMA = """
create table customers(id integer primary key, name text not null);
create table items(id integer primary key, item text not null, price integer not null);
create table orders(id integer primary key, customer_id integer not null references customers(id),
  item_id integer not null references items(id), quantity integer not null);
"""
_ROWS = 3


def find_customer(
    db: sqlite3.Connection, name: Annotated[str, "name of the customer"]
) -> list[Row]:
    """Find a customer by name."""
    rows = db.execute("select id, name from customers where name = ?", (name,)).fetchall()
    if not rows:
        raise ToolError("not found")
    return [{"id": row[0], "name": row[1]} for row in rows]


def find_item(db: sqlite3.Connection, item: Annotated[str, "name of the item"]) -> list[Row]:
    """Find an item by name: its id and its price."""
    rows = db.execute("select id, item, price from items where item = ?", (item,)).fetchall()
    if not rows:
        raise ToolError("not found")
    return [{"id": row[0], "item": row[1], "price": row[2]} for row in rows]


def create_order(
    db: sqlite3.Connection,
    customer_id: Annotated[int, "id of the customer"],
    item_id: Annotated[int, "id of the item"],
    quantity: Annotated[int, "how many, at least 1"],
) -> dict[str, Any]:
    """Order an item for a customer."""
    if quantity < 1:
        raise ToolError("quantity must be at least 1")
    customer = db.execute("select 1 from customers where id = ?", (customer_id,)).fetchone()
    item = db.execute("select 1 from items where id = ?", (item_id,)).fetchone()
    if customer is None or item is None:
        raise ToolError("not found")
    db.execute(
        "insert into orders(customer_id, item_id, quantity) values (?, ?, ?)",
        (customer_id, item_id, quantity),
    )
    return {"ok": True}


def _draw_shop_task(names: Names, kind: str, rng: random.Random) -> DrawnTask:
    name, item = names.draw_pair("first", "item")
    ids = names.draw_ids(2 * _ROWS)
    people = [name, *names.draw_some("first", _ROWS - 1, avoid=name)]
    things = [item, *names.draw_some("item", _ROWS - 1, avoid=item)]
    customers: list[Row] = [{"id": ids.pop(), "name": person} for person in people]
    items: list[Row] = [
        {"id": ids.pop(), "item": thing, "price": rng.randint(10, 99)} for thing in things
    ]
    return DrawnTask(
        slots={"name": name, "item": item, "n": rng.randint(2, 9)},
        targets={"customer_id": customers[0]["id"], "item_id": items[0]["id"]},
        pair=(name, item),
        tables={"customers": customers, "items": items},
    )


def _plan_order(task: DrawnTask) -> list[Call]:
    order = {**task.targets, "quantity": task.slots["n"]}
    return [
        ("find_customer", {"name": task.slots["name"]}),
        ("find_item", {"item": task.slots["item"]}),
        ("create_order", order),
    ]


SHOP = App(
    key="shop",
    schema=SCHEMA,
    tools=tools_by_name(
        define_tool(find_customer, read_only=True, idempotent=True),
        define_tool(find_item, read_only=True, idempotent=True),
        define_tool(create_order, read_only=False, idempotent=False),
    ),
    kinds={
        "order": TaskKind(
            (
                "Order {n} {item} for {name}.",
                "{name} wants to buy {n} {item}.",
                "Please sell {n} {item} to {name}.",
            ),
            _plan_order,
        )
    },
    draw=_draw_shop_task,
)
