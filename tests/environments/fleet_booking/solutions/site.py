"""The site, as the scripted solutions of fleet_booking tasks use it: a few short methods."""

import re
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Solution = Callable[["Site"], None]

OWN_CARD = 1


class Solutions(dict[str, Solution]):
    """Solutions by the second part of a task's key."""

    def of(self, short_id: str) -> Callable[[Solution], Solution]:
        """Decorates the solution of a task."""

        def register(function: Solution) -> Solution:
            self[short_id] = function
            return function

        return register


class Site:
    """Tool calls only: a solution knows only its task and the results."""

    def __init__(self, call: Callable[[str, dict[str, Any]], Any], prompt: str) -> None:
        self._call = call
        self._prompt = prompt

    def quoted(self) -> list[str]:
        """Return the quoted text of the prompt."""
        return re.findall('["“]([^"”]+)["”]', self._prompt)

    def do(self, tool: str, **arguments: Any) -> Any:
        return self._call(tool, arguments)

    def search(self, location: str, **wishes: Any) -> list[Row]:
        return self.do("search_hotels", location=location, page_size=50, **wishes)["hotels"]

    def rooms(self, hotel: Row | int, dates: tuple[str, str], **party: Any) -> list[Row]:
        """Free rooms, cheapest first."""
        hotel_id = hotel if isinstance(hotel, int) else hotel["id"]
        return self.do(
            "check_availability",
            hotel_id=hotel_id,
            check_in_date=dates[0],
            check_out_date=dates[1],
            **party,
        )

    def reserve(self, room: Row, dates: tuple[str, str], adults: int = 1, **details: Any) -> int:
        """The id of the pending booking."""
        made = self.do(
            "create_booking",
            room_id=room["id"],
            check_in_date=dates[0],
            check_out_date=dates[1],
            adults=adults,
            **details,
        )
        return made["booking_id"]

    def book(
        self,
        room: Row,
        dates: tuple[str, str],
        adults: int = 1,
        card: int = OWN_CARD,
        **details: Any,
    ) -> int:
        booking = self.reserve(room, dates, adults, **details)
        self.do("pay_booking", booking_id=booking, payment_method_id=card, agree_to_terms=True)
        return booking

    def card(self, number: str, month: int, year: int, name: str, cvv: str, **more: Any) -> int:
        added = self.do(
            "add_payment_method",
            card_number=number,
            expiry_month=month,
            expiry_year=year,
            cardholder_name=name,
            cvv=cvv,
            **more,
        )
        return added["payment_method_id"]

    def save(self, list_name: str, hotels: Sequence[Row], notes: str | None = None) -> None:
        for hotel in hotels:
            self.do("save_property", hotel_id=hotel["id"], list_name=list_name, notes=notes)

    def new_list(self, list_name: str, hotels: Sequence[Row] = ()) -> None:
        self.do("create_wishlist", list_name=list_name)
        self.save(list_name, hotels)

    def features(self, hotel: Row) -> list[str]:
        about = self.do("get_hotel", hotel_id=hotel["id"])
        return about["amenities"] + [facility["name"] for facility in about["facilities"]]

    def near(self, hotel: Row) -> list[Row]:
        return self.do("get_nearby_attractions", hotel_id=hotel["id"])

    def policies(self, hotel: Row) -> Row:
        return self.do("get_property_policies", hotel_id=hotel["id"])


def guest(first: str, last: str, email: str, code: str, number: str) -> Row:
    return {
        "guest_first_name": first,
        "guest_last_name": last,
        "guest_email": email,
        "guest_phone_country_code": code,
        "guest_phone_number": number,
    }


def of_kind(rooms: list[Row], kind: str) -> Row:
    """The cheapest room of a kind."""
    return next(room for room in rooms if kind in room["room_type"])
