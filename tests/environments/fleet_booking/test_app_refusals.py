"""Refusals of the tools of fleet_booking, which survive any arguments."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_environments.api import Instance, ToolError, open_instance
from flotilla_environments.fleet_booking.app import FLEET_BOOKING
from tests.support.examples import examples

DATES = {"check_in_date": "2026-05-04", "check_out_date": "2026-05-07"}
SUMMER = "Summer Getaways"
TEXT = st.text(max_size=20)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.one_of(TEXT, st.sampled_from(["2026-05-04", "London", SUMMER, "x" * 300])),
    "integer": st.one_of(st.integers(-2, 12), st.integers(-(2**63), 2**63 - 1)),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(TEXT, max_size=3),
}


@pytest.fixture
def site() -> Instance:
    return open_instance("fleet_booking", "kinesis")


CARD = {"card_number": "4" * 16, "expiry_month": 1, "expiry_year": 2027, "cardholder_name": "A"}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("search_hotels", {"sort_by": "luck"}, "sort_by must be one of top_reviewed"),
        ("search_hotels", {"page_size": 51}, "page_size between 1 and 50"),
        ("search_hotels", {"adults": 0}, "adults and rooms must be at least 1"),
        ("search_hotels", {"check_in_date": "2026-05-04"}, "or neither"),
        ("search_hotels", {"features": "Pool"}, "features must be a list of strings"),
        ("search_hotels", {"min_price": True}, "min_price must be a number"),
        ("search_hotels", {"location": "x" * 201}, "at most 200 characters"),
        ("check_availability", {"hotel_id": 1, **DATES}, "hotel 1 not found"),
        (
            "check_availability",
            {"hotel_id": 5652, **DATES, "check_in_date": "4 May"},
            "check_in_date must be a date as YYYY-MM-DD",
        ),
        (
            "check_availability",
            {"hotel_id": 5652, "check_in_date": "2025-12-30", "check_out_date": "2026-01-03"},
            "in the past: today is 2026-01-02",
        ),
        (
            "check_availability",
            {"hotel_id": 5652, "check_in_date": "2026-05-07", "check_out_date": "2026-05-07"},
            "check_out_date must be after check_in_date",
        ),
        ("create_booking", {"room_id": 11207, "adults": 5, **DATES}, "is not free"),
        (
            "create_booking",
            {"room_id": 11207, "adults": 1, **DATES, "purpose_of_trip": "Fun"},
            "purpose_of_trip must be Leisure or Business",
        ),
        (
            "pay_booking",
            {"booking_id": 4471, "payment_method_id": 1, "agree_to_terms": True},
            "booking 4471 not found",
        ),
        ("cancel_booking", {"booking_id": 866}, "is no_show and cannot be changed"),
        ("set_default_payment_method", {"payment_method_id": 12}, "payment method 12 not found"),
        ("add_payment_method", CARD | {"expiry_month": 13}, "expiry_month must be 1 to 12"),
        ("add_payment_method", CARD | {"expiry_year": 27}, "expiry_year must have four digits"),
        ("add_payment_method", CARD | {"card_number": "4242"}, "at least 12 digits"),
        ("update_profile", {}, "nothing to change"),
        ("update_profile", {"email": "Owen.Price@mail.test"}, "another account has that e-mail"),
        ("update_profile", {"date_of_birth": "10/10/81"}, "date_of_birth must be a date"),
        ("create_wishlist", {"list_name": SUMMER}, "exists already"),
        ("create_wishlist", {"list_name": " "}, "must not be empty"),
        ("save_property", {"hotel_id": 358, "list_name": "New"}, "create it first"),
        ("save_property", {"hotel_id": 5017, "list_name": SUMMER}, "already"),
        ("remove_saved_property", {"hotel_id": 358}, "is not saved there"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(
    site: Instance, name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        site.call(name, arguments)
    assert site.snapshot("current") == site.snapshot("seed")


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_arguments_break_a_tool(data: st.DataObject) -> None:
    site = open_instance("fleet_booking", "kinesis")
    spec = data.draw(st.sampled_from([tool.spec for tool in FLEET_BOOKING.tools.values()]))
    properties = spec.parameters["properties"].items()
    arguments = {
        name: data.draw(st.one_of(st.none(), VALUES[schema["type"]]), label=name)
        for name, schema in properties
    }
    try:
        json.dumps(site.call(spec.name, arguments))
    except ToolError as error:
        assert str(error)
    finally:
        site.close()
