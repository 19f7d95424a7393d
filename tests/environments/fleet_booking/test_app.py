"""The fleet_booking app by itself: its data and its tools."""

import sqlite3
from typing import Any

import pytest

from flotilla_environments.api import ALL_KEYS, ENV_KEYS, Instance, ToolError, open_instance
from flotilla_environments.fleet_booking.seed import database

DATES = {"check_in_date": "2026-05-04", "check_out_date": "2026-05-07"}
SUMMER = "Summer Getaways"


@pytest.fixture
def site() -> Instance:
    return open_instance("fleet_booking", "kinesis", "v0.0.15")


def ids(hotels: list[dict[str, Any]]) -> list[int]:
    return [hotel["id"] for hotel in hotels]


def book(site: Instance, **changes: Any) -> int:
    arguments = {"room_id": 11207, "adults": 1, **DATES} | changes
    return site.call("create_booking", arguments)["booking_id"]


def pay(site: Instance, booking: int, card: int = 1) -> dict[str, Any]:
    return site.call(
        "pay_booking",
        {"booking_id": booking, "payment_method_id": card, "agree_to_terms": True},
    )


def row(site: Instance, table: str, row_id: int) -> dict[str, Any]:
    found = site.query("current", f"select * from {table} where id = ?", (row_id,))
    return dict(zip(found.columns, found.rows[0], strict=True))


def test_it_is_served_but_generates_no_tasks() -> None:
    assert "fleet_booking" in ALL_KEYS
    assert "fleet_booking" not in ENV_KEYS


def test_equal_data_ids_give_equal_databases_in_every_version(site: Instance) -> None:
    database.build_seed_database.cache_clear()
    again = open_instance("fleet_booking", "kinesis", "v0.0.4")
    assert again.snapshot("seed") == site.snapshot("seed") == site.snapshot("current")
    with pytest.raises(ValueError, match="data id 'other' not found: fleet_booking has kinesis"):
        open_instance("fleet_booking", "other")
    with pytest.raises(ValueError, match=r"'flights' not found: use one of booking.*fleet_booking"):
        open_instance("flights", "kinesis")


def test_the_data_is_whole(site: Instance) -> None:
    assert site.query("seed", "select count(*) from hotels").rows[0][0] > 250
    db = sqlite3.connect(":memory:")
    db.deserialize(site.snapshot("seed"))
    assert db.execute("pragma foreign_key_check").fetchall() == []
    db.close()


def test_every_tool_describes_what_it_does_and_what_may_be_retried(site: Instance) -> None:
    specs = {spec.name: spec for spec in site.tools()}
    assert all(spec.description for spec in specs.values())
    writes = {name for name, spec in specs.items() if not spec.read_only}
    assert "search_hotels" not in writes
    assert {"create_booking", "pay_booking", "save_property"} <= writes
    assert not specs["pay_booking"].idempotent
    assert specs["cancel_booking"].destructive
    search = specs["search_hotels"].parameters
    assert search["required"] == []
    assert search["properties"]["features"]["items"] == {"type": "string"}


def test_a_search_filters_sorts_and_pages(site: Instance) -> None:
    wishes = {"location": "London", "property_types": ["hotel"], "min_stars": 4, "max_price": 150}
    found = site.call("search_hotels", {**wishes, "sort_by": "price_lowest"})
    prices = [hotel["lowest_price"] for hotel in found["hotels"]]
    assert prices == sorted(prices)
    assert prices[-1] <= 150
    assert all(hotel["star_rating"] >= 4 for hotel in found["hotels"])
    page = site.call(
        "search_hotels", {**wishes, "sort_by": "price_lowest", "page": 2, "page_size": 2}
    )
    assert page["total"] == found["total"]
    assert ids(page["hotels"]) == ids(found["hotels"])[2:4]
    pool = site.call("search_hotels", {"location": "London", "features": ["pool", "Free WiFi"]})
    assert 9504 in ids(pool["hotels"])
    assert site.call("search_hotels", {"location": None})["total"] > 250


def test_rooms_run_out_and_a_cancelled_booking_frees_them(site: Instance) -> None:
    request = {"hotel_id": 5652, **DATES}
    free = next(r["free"] for r in site.call("check_availability", request) if r["id"] == 11207)
    booking = book(site, room_count=free, adults=free)
    assert 11207 not in ids(site.call("check_availability", request))
    with pytest.raises(ToolError, match="room 11207 is not free"):
        book(site)
    later = {"check_in_date": "2026-05-07", "check_out_date": "2026-05-08"}
    assert book(site, **later)
    site.call("cancel_booking", {"booking_id": booking})
    assert 11207 in ids(site.call("check_availability", request))


def test_a_paid_booking_is_confirmed_with_one_transaction(site: Instance) -> None:
    booking = book(site, guest_email="Ann@Mail.Test", guest_phone_number="(617) 555-0148")
    pending = row(site, "bookings", booking)
    assert (pending["status"], pending["payment_status"]) == ("pending", "pending")
    assert pending["guest_email"] == "ann@mail.test"
    assert pending["guest_phone_number"] == "6175550148"
    assert pending["guest_first_name"] == "Charles"
    assert (pending["base_price"], pending["discount_amount"]) == (252.0, 12.6)
    assert (pending["taxes_fees"], pending["total_price"]) == (35.91, 275.31)
    paid = pay(site, booking)
    confirmed = row(site, "bookings", booking)
    assert (confirmed["status"], confirmed["payment_status"]) == ("confirmed", "paid")
    assert row(site, "transactions", paid["transaction_id"])["amount"] == 275.31
    with pytest.raises(ToolError, match="only a pending one is paid"):
        pay(site, booking)


def test_the_same_calls_leave_the_same_database(site: Instance) -> None:
    other = open_instance("fleet_booking", "kinesis")
    for instance in (site, other):
        instance.call("preview_booking", {"room_id": 11207, "adults": 1, **DATES})
        pay(instance, book(instance))
    assert site.snapshot("current") == other.snapshot("current")


def test_a_preview_holds_a_price_and_books_nothing(site: Instance) -> None:
    held = site.call("preview_booking", {"room_id": 11207, "adults": 1, **DATES})
    assert held["total_price"] == 275.31
    assert row(site, "order_tokens", 1)["token"] == held["order_token"]
    assert site.query("current", "select count(*) from bookings") == site.query(
        "seed", "select count(*) from bookings"
    )


@pytest.mark.parametrize(
    ("hotel", "kept"), [(8800, 0.0), (5652, 0.5)], ids=["flexible", "moderate and near"]
)
def test_cancelling_keeps_what_the_policy_states(site: Instance, hotel: int, kept: float) -> None:
    near = {"check_in_date": "2026-01-04", "check_out_date": "2026-01-05"}
    room = site.call("check_availability", {"hotel_id": hotel, **near})[0]
    booking = book(site, room_id=room["id"], **near)
    pay(site, booking)
    cancelled = site.call("cancel_booking", {"booking_id": booking})
    total = row(site, "bookings", booking)["total_price"]
    assert cancelled["penalty_amount"] == pytest.approx(total * kept, abs=0.01)
    assert cancelled["refund_amount"] + cancelled["penalty_amount"] == pytest.approx(total)
    assert row(site, "bookings", booking)["payment_status"] == "refunded"
    with pytest.raises(ToolError, match="is cancelled and cannot be changed"):
        site.call("cancel_booking", {"booking_id": booking})


def test_a_changed_stay_is_priced_again_and_may_use_its_own_room(site: Instance) -> None:
    booking = book(site, room_count=6, adults=6)
    changed = site.call("modify_booking", {"booking_id": booking, "check_out_date": "2026-05-06"})
    assert changed["base_price"] == 84 * 2 * 6
    noted = site.call("modify_booking", {"booking_id": booking, "special_requests": "Quiet"})
    assert noted["base_price"] == changed["base_price"]
    with pytest.raises(ToolError, match="nothing to change"):
        site.call("modify_booking", {"booking_id": booking})


def test_a_renamed_wishlist_keeps_its_hotels_and_notes(site: Instance) -> None:
    (before,) = site.call("list_wishlists", {})
    site.call("rename_wishlist", {"list_name": SUMMER, "new_name": "Warm places"})
    (after,) = site.call("list_wishlists", {})
    assert after == before | {"list_name": "Warm places"}
    site.call("remove_saved_property", {"hotel_id": 5017})
    site.call(
        "update_saved_property", {"hotel_id": 9675, "list_name": "Warm places", "notes": "Next"}
    )
    (left,) = site.call("list_wishlists", {})[0]["hotels"]
    assert (left["hotel_id"], left["notes"]) == (9675, "Next")
    site.call("delete_wishlist", {"list_name": "Warm places"})
    assert site.call("list_wishlists", {}) == []


@pytest.mark.parametrize(
    ("number", "brand", "kept"),
    [
        ("4500 9181 5862 4510", "Visa", "4500918158624510"),
        ("2221-0000-0000-0009", "Mastercard", "2221000000000009"),
        ("371449635398431", "Amex", "371449635398431"),
        ("6200000000000005", "UnionPay", "6200000000000005"),
        ("9999 1111 1799", "Other", "9999 1111 1799"),
    ],
)
def test_a_card_is_kept_in_one_form(site: Instance, number: str, brand: str, kept: str) -> None:
    card = {"card_number": number, "expiry_month": 1, "expiry_year": 2026, "cardholder_name": "A"}
    added = site.call("add_payment_method", {**card, "make_default": True})
    saved = row(site, "payment_methods", added["payment_method_id"])
    assert (saved["card_type"], saved["card_number"]) == (brand, kept)
    assert saved["last_four"] == kept[-4:]
    assert row(site, "payment_methods", 1)["is_default"] == 0
    once = site.call("add_payment_method", {**card, "save_for_reuse": False})
    listed = ids(site.call("list_payment_methods", {}))
    assert added["payment_method_id"] in listed
    assert once["payment_method_id"] not in listed
