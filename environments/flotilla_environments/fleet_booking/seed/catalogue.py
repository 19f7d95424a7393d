"""Rows of the catalogue: hotels with all that belongs to them, places, and the site's lists."""

import math
from collections.abc import Iterable
from itertools import count

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.seed.accounts import CREATED
from flotilla_environments.fleet_booking.seed.model import (
    AMENITIES,
    FACILITIES,
    Hotel,
    Review,
    Room,
)
from flotilla_environments.fleet_booking.seed.world import CITIES, NEIGHBORHOODS, Place

FIRST_ROOM = 40001
HOSTS = 40
WALK_MINUTES_PER_KM = 12
KM_PER_DEGREE = 111.0

FEATURED = (13340, 10835, 358, 2932, 5351, 6370, 10840, 5352)
DEALS = (3001, 18288, 3002, 2101, 12792, 17113, 2905, 8259)
TRENDING = ("Cancun", "Dubai", "Tokyo", "Barcelona", "Paris", "Chicago")

# Reviews of every hotel, and of every fourth hotel; their scores follow from the hotel's rating.
_USUAL = ("Elin Strand", "Would come again", "Very clean, quiet and comfortable room.")
_OTHERS = (
    ("Marco Neri", "Good location", "Easy to reach, and the reception was helpful."),
    ("Ama Owusu", "Nice breakfast room", "Fresh coffee and a friendly team."),
    ("Jonas Weber", "As described", "The room was as in the pictures, the bed was firm."),
    ("Mei Lin", "Good for a short stay", "Check-in took a minute, everything worked."),
)


def build_catalogue_tables(hotels: Iterable[Hotel]) -> dict[str, list[Row]]:
    hotels = list(hotels)
    amenity_ids = {name: number for number, name in enumerate(AMENITIES, 1)}
    rooms = list(_room_rows(hotels))
    return {
        "locations": _location_rows(),
        "hosts": [_host_row(number) for number in range(1, HOSTS + 1)],
        "hotels": [_hotel_row(hotel) for hotel in hotels],
        "hotel_images": _number_rows(_hotel_image_row(hotel) for hotel in hotels),
        "rooms": rooms,
        "room_images": _number_rows(_room_image_row(room) for room in rooms),
        "rate_plans": _number_rows(_rate_plan_row(room) for room in rooms),
        "amenities": [
            {"id": amenity_ids[name], "name": name, "category": category}
            for name, category in AMENITIES.items()
        ],
        "hotel_amenities": [
            {"hotel_id": hotel.id, "amenity_id": amenity_ids[name]}
            for hotel in hotels
            for name in hotel.has
        ],
        "facilities": _number_rows(
            _facility_row(hotel.id, category) for hotel in hotels for category in hotel.facilities
        ),
        "property_policies": _number_rows(_policy_row(hotel) for hotel in hotels),
        "nearby_attractions": _number_rows(
            row for hotel in hotels for row in _attraction_rows(hotel)
        ),
        "reviews": _number_rows(row for hotel in hotels for row in _review_rows(hotel)),
        "featured_hotels": _rank_hotels(FEATURED),
        "hotel_deals": [{**row, "title": "Early 2026 deal"} for row in _rank_hotels(DEALS)],
        "trending_destinations": [
            {"position": position, "city": city, "searches_past_month": 20_000 - 1_700 * position}
            for position, city in enumerate(TRENDING, 1)
        ],
    }


def _number_rows(rows: Iterable[Row]) -> list[Row]:
    return [{"id": number, **row} for number, row in enumerate(rows, 1)]


def _rank_hotels(hotel_ids: Iterable[int]) -> list[Row]:
    return [{"position": position, "hotel_id": id_} for position, id_ in enumerate(hotel_ids, 1)]


def _location_rows() -> list[Row]:
    places = [*CITIES.values(), *NEIGHBORHOODS.values()]
    return _number_rows(
        {
            "name": place.name,
            "type": "neighborhood" if place.city else "city",
            "city": place.city or place.name,
            "country": place.country,
            "latitude": place.latitude,
            "longitude": place.longitude,
            "created_at": CREATED,
        }
        for place in places
    )


def _host_row(number: int) -> Row:
    """Hosts 1 to 5 are superhosts, and only hotels marked `superhost` have one of them."""
    return {
        "id": number,
        "name": f"Host {number}",
        "is_superhost": int(number <= 5),
        "response_rate": 80 + number % 20,
        "created_at": CREATED,
    }


def _hotel_row(hotel: Hotel) -> Row:
    centre = NEIGHBORHOODS.get(hotel.area) or CITIES[hotel.city]
    latitude, longitude = _point_near(centre, hotel.id)
    city = CITIES[hotel.city]
    return {
        "id": hotel.id,
        "host_id": 1 + hotel.id % 5 if hotel.superhost else 6 + hotel.id % (HOSTS - 5),
        "name": hotel.name,
        "description": f"{hotel.kind} in {hotel.area or hotel.city}.",
        "property_type": hotel.kind,
        "star_rating": float(hotel.stars),
        "average_rating": hotel.rating,
        "total_reviews": hotel.reviews,
        "address": hotel.address,
        "neighborhood": hotel.area,
        "city": hotel.city,
        "country": city.country,
        "latitude": latitude,
        "longitude": longitude,
        "distance_to_center_km": round(distance_km(city, latitude, longitude), 2),
        "total_rooms": hotel.total_rooms,
        "is_active": 1,
        "created_at": CREATED,
        "updated_at": CREATED,
    }


def _point_near(centre: Place, hotel_id: int) -> tuple[float, float]:
    """Return a point within about a kilometre of the centre, always the same for a hotel."""
    angle = hotel_id * 2.399963  # the golden angle spreads successive numbers evenly
    radius = 0.002 + (hotel_id % 7) * 0.001
    return (
        round(centre.latitude + radius * math.sin(angle), 6),
        round(centre.longitude + radius * math.cos(angle), 6),
    )


def distance_km(place: Place, latitude: float, longitude: float) -> float:
    """Return the distance, good to a percent within a city: the Earth taken as flat."""
    north = (latitude - place.latitude) * KM_PER_DEGREE
    east = (longitude - place.longitude) * KM_PER_DEGREE * math.cos(math.radians(latitude))
    return math.hypot(north, east)


def _room_rows(hotels: Iterable[Hotel]) -> Iterable[Row]:
    numbers = count(FIRST_ROOM)
    for hotel in hotels:
        for room in hotel.all_rooms:
            yield _room_row(hotel.id, room, room.id or next(numbers))


def _room_row(hotel_id: int, room: Room, number: int) -> Row:
    return {
        "id": number,
        "hotel_id": hotel_id,
        "name": room.name,
        "room_type": room.kind,
        "bed_type": room.bed,
        "view_type": f"{room.view} View",
        "base_price": float(room.price),
        "max_occupancy": room.adults + room.children,
        "adults_capacity": room.adults,
        "children_capacity": room.children,
        "available_count": room.count,
        "created_at": CREATED,
    }


def _hotel_image_row(hotel: Hotel) -> Row:
    return {
        "hotel_id": hotel.id,
        "url": f"https://images.invalid/hotels/{hotel.id}.jpg",
        "caption": f"Front of {hotel.name}",
        "created_at": CREATED,
    }


def _room_image_row(room: Row) -> Row:
    url = f"https://images.invalid/rooms/{room['id']}.jpg"
    return {"room_id": room["id"], "url": url, "created_at": CREATED}


def _rate_plan_row(room: Row) -> Row:
    plan = "Standard Rate"
    return {"room_id": room["id"], "name": plan, "cancellation_policy_type": "Moderate"}


def _facility_row(hotel_id: int, category: str) -> Row:
    name = FACILITIES[category]
    return {
        "hotel_id": hotel_id,
        "name": name,
        "category": category,
        "description": f"{name} for guests of the house.",
        "created_at": CREATED,
    }


def _policy_row(hotel: Hotel) -> Row:
    hours = {"Flexible": 24, "Moderate": 120}.get(hotel.cancellation)
    return {
        "hotel_id": hotel.id,
        "check_in_from": hotel.check_in,
        "check_in_until": "23:00",
        "check_out_until": "11:00",
        "cancellation_policy_type": hotel.cancellation,
        "free_cancellation_hours": hours,
        "pet_policy": hotel.pets,
        "smoking_policy": hotel.smoking,
        "created_at": CREATED,
    }


def _attraction_rows(hotel: Hotel) -> Iterable[Row]:
    for place in hotel.near:
        yield {
            "hotel_id": hotel.id,
            "name": place.name,
            "type": place.kind,
            "distance_km": place.km,
            "walking_minutes": round(place.km * WALK_MINUTES_PER_KM),
            "created_at": CREATED,
        }


def _review_rows(hotel: Hotel) -> Iterable[Row]:
    other = _OTHERS[hotel.id % len(_OTHERS)]
    usual = (
        Review(*_USUAL, min(10.0, hotel.rating + 0.3), f"2025-11-{1 + hotel.id % 18:02d}"),
        Review(*other, max(1.0, hotel.rating - 0.3), f"2025-08-{1 + hotel.id % 28:02d}"),
    )
    for review in (*hotel.remarks, *usual):
        yield {
            "hotel_id": hotel.id,
            "reviewer_name": review.name,
            "title": review.title,
            "comment": review.comment,
            "rating": round(review.rating, 1),
            "stay_date": review.date,
            "created_at": f"{review.date} 20:00:00",
        }
