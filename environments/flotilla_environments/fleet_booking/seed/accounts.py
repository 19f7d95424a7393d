"""People with their cards, lists and stays. User 1 is the one who is signed in."""

from typing import Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.clock import NOW

SIGNED_IN = 1
CREATED = "2024-03-01 10:00:00"

_PEOPLE = (
    (1, "Charles", "Moore", "charles.moore@synapse.com", "+13185118179", "1979-04-02"),
    (2, "Ingrid", "Solberg", "ingrid.solberg@mail.test", "+4791234567", "1988-11-19"),
    (3, "Mateo", "Rivas", "mateo.rivas@mail.test", "+34611222333", "1992-06-07"),
    (4, "Hana", "Kobayashi", "hana.kobayashi@mail.test", "+819012345678", "1985-01-23"),
    (5, "Owen", "Price", "owen.price@mail.test", "+447700900123", "1971-09-30"),
    (6, "Zainab", "Bello", "zainab.bello@mail.test", "+2348031234567", "1995-12-12"),
    (7, "Lukas", "Brandt", "lukas.brandt@mail.test", "+491701234567", "1983-03-15"),
    (8, "Priya", "Nair", "priya.nair@mail.test", "+919812345678", "1990-08-21"),
    (9, "Chloé", "Martin", "chloe.martin@mail.test", "+33612345678", "1997-02-28"),
    (10, "Sam", "Whitfield", "sam.whitfield@mail.test", "+14155550133", "1966-05-05"),
)

# user, id, type, last four, month, year, code
_CARDS = (
    (1, 1, "Mastercard", "7605", 8, 2028, "517"),
    (8, 12, "Visa", "2291", 3, 2027, "204"),
    (3, 37, "Visa", "9940", 10, 2029, "331"),
    (9, 81, "Amex", "3008", 1, 2030, "6402"),
)

_LISTS = (
    (1, "Summer Getaways", "2025-09-14 18:20:00"),
    (8, "Dream Vacations", "2025-06-02 08:00:00"),
    (8, "City breaks", "2025-07-11 21:15:00"),
)

_SAVED = (
    (1, 5017, "Summer Getaways", "Good for family reunion"),
    (1, 9675, "Summer Getaways", "Close to attractions"),
    (8, 2932, "Dream Vacations", "For our anniversary"),
    (8, 8800, "City breaks", None),
)


def build_account_tables() -> dict[str, list[Row]]:
    return {
        "users": [_user_row(*person) for person in _PEOPLE],
        "rewards_program": [_rewards_row(person[0]) for person in _PEOPLE],
        "payment_methods": [_card_row(*card) for card in _CARDS],
        "wishlist_lists": [
            {"user_id": str(user), "list_name": name, "created_at": at} for user, name, at in _LISTS
        ],
        "saved_properties": [
            {
                "user_id": user,
                "hotel_id": hotel,
                "list_name": name,
                "notes": notes,
                "saved_at": "2025-09-15 07:30:00",
            }
            for user, hotel, name, notes in _SAVED
        ],
        "messages": [],
    }


def _user_row(number: int, first: str, last: str, email: str, phone: str, born: str) -> Row:
    return {
        "id": number,
        "email": email,
        "first_name": first,
        "last_name": last,
        "phone": phone,
        "date_of_birth": born,
        "country": "United States" if phone.startswith("+1") else None,
        "address": f"{number * 14} Alder Street",
        "created_at": CREATED,
        "last_active": NOW,
    }


def _rewards_row(user: int) -> Row:
    """Every third member has Silver, with 5 % off; the others have no discount yet."""
    silver = user % 3 == 1
    return {
        "user_id": user,
        "tier": "Silver" if silver else "Bronze",
        "discount_percentage": 0.05 if silver else 0.0,
        "points": 1240 if silver else 310,
        "updated_at": CREATED,
    }


def _card_row(
    user: int, number: int, kind: str, last_four: str, month: int, year: int, code: str
) -> Row:
    first, last = next(person[1:3] for person in _PEOPLE if person[0] == user)
    row: dict[str, Any] = {
        "id": number,
        "user_id": user,
        "card_type": kind,
        "last_four": last_four,
        "expiry_month": month,
        "expiry_year": year,
        "billing_address": f"{user * 14} Alder Street",
        "billing_postal_code": f"{60000 + user}",
        "is_default": 1,
        "is_saved_for_reuse": 1,
        "card_number": f"{'5425' if kind == 'Mastercard' else '4000'}00000000{last_four}",
        "cvv": code,
        "cardholder_name": f"{first} {last}",
        "created_at": CREATED,
    }
    return row
