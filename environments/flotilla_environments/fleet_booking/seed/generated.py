"""Ordinary hotels around the written-out ones, drawn from a fixed seed.

They have at most `STARS[-1]` stars, a rating below 8 and none of the rarer amenities, so that what
a search for something special finds are the hotels that are written out.
"""

import random
from collections.abc import Iterator

from flotilla_environments.fleet_booking.seed.model import (
    AIR,
    PARKING,
    SHUTTLE,
    WIFI,
    Attraction,
    Hotel,
    Room,
)
from flotilla_environments.fleet_booking.seed.world import CITIES

FIRST_ID = 30001
PER_CITY = 6
STARS = (2.0, 2.5, 3.0, 3.5)
_KINDS = ("Hotel", "Hotel", "Hotel", "Guesthouse", "Apartment", "Holiday Home")
_FIRST = (
    "Amber",
    "Cedar",
    "Copper",
    "Fern",
    "Heron",
    "Ivory",
    "Linden",
    "Maple",
    "Slate",
    "Willow",
)
_SECOND = ("Court", "Gate", "House", "Lodge", "Place", "Rooms", "Square", "Stay", "Terrace", "Yard")
_STREETS = ("Bridge Street", "Church Lane", "Garden Road", "Mill Street", "Station Road")
_NEAR = (
    ("Metro Station", "Transport"),
    ("Shopping Center", "Shopping"),
    ("City Park", "Nature"),
    ("History Museum", "Museum"),
    ("Old Town", "Tourist Attraction"),
)
_AMENITIES = (AIR, PARKING, SHUTTLE)
_FACILITIES = ("Bar", "Parking", "Restaurant")
_CANCELLATIONS = ("Flexible", "Moderate", "Strict")


def generate_hotels() -> Iterator[Hotel]:
    rng = random.Random("fleet_booking/generated")
    hotel_id = FIRST_ID
    for city in CITIES:
        for _ in range(PER_CITY):
            yield _draw_hotel(hotel_id, city, rng)
            hotel_id += 1


def _draw_hotel(hotel_id: int, city: str, rng: random.Random) -> Hotel:
    price = float(rng.randint(85, 240))
    name, kind = rng.choice(_NEAR)
    return Hotel(
        id=hotel_id,
        name=f"{city} {rng.choice(_FIRST)} {rng.choice(_SECOND)}",
        kind=rng.choice(_KINDS),
        city=city,
        address=f"{rng.randint(1, 240)} {rng.choice(_STREETS)}",
        stars=rng.choice(STARS),
        rating=rng.randint(55, 79) / 10,
        reviews=rng.randint(20, 290),
        has=(WIFI, *rng.sample(_AMENITIES, rng.randint(0, 2))),
        facilities=tuple(rng.sample(_FACILITIES, rng.randint(0, 2))),
        rooms=(
            Room("Standard Room", price, children=rng.randint(0, 2)),
            Room("Double Room", price + 15, "Double", "Courtyard"),
            Room("Family Room", price + 60, "2 Queen", "Street", 3),
        ),
        near=(Attraction(name, kind, rng.randint(2, 40) / 10),),
        cancellation=rng.choice(_CANCELLATIONS),
        pets=rng.choice(("Allowed", "Not Allowed", "On Request")),
        smoking=rng.choice(("Not Allowed", "Designated Areas")),
        check_in=rng.choice(("14:00", "15:00", "16:00")),
        total_rooms=rng.randint(12, 180),
    )
