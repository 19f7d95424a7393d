"""Finding hotels: by place and wishes, on the map, and how prices are spread."""

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.seed.catalogue import distance_km
from flotilla_environments.fleet_booking.seed.world import Place
from flotilla_environments.fleet_booking.tools.availability import Party, open_rooms
from flotilla_environments.fleet_booking.tools.rows import like_pattern, select_rows
from flotilla_environments.toolkit import Tool, ToolError, define_tool, tools_by_name

MAX_PAGE = 50
SORTS: dict[str, Callable[[Row], Any]] = {
    "top_reviewed": lambda h: (-h["average_rating"], -h["total_reviews"]),
    "best_reviewed_lowest_price": lambda h: (-h["average_rating"], h["lowest_price"]),
    "most_reviews": lambda h: -h["total_reviews"],
    "price_lowest": lambda h: h["lowest_price"],
    "price_highest": lambda h: -h["lowest_price"],
    "stars_highest": lambda h: (-h["star_rating"], -h["average_rating"]),
    "stars_lowest": lambda h: (h["star_rating"], -h["average_rating"]),
}
_SHOWN = """id, name, property_type, city, country, address, neighborhood, star_rating,
  average_rating, total_reviews, distance_to_center_km, latitude, longitude"""


@dataclass(frozen=True)
class HotelFilter:
    """Conditions on a hotel; None and () do not restrict. Prices are dollars a night."""

    property_types: Sequence[str] = ()
    min_price: float | None = None
    max_price: float | None = None
    min_rating: float | None = None
    min_stars: float | None = None
    max_stars: float | None = None
    features: Sequence[str] = ()

    def accepts_hotel(self, hotel: Row, features: set[str]) -> bool:
        kinds = {kind.casefold() for kind in self.property_types}
        return (
            (not kinds or hotel["property_type"].casefold() in kinds)
            and _is_between(hotel["lowest_price"], self.min_price, self.max_price)
            and _is_between(hotel["average_rating"], self.min_rating, None)
            and _is_between(hotel["star_rating"], self.min_stars, self.max_stars)
            and {wish.casefold() for wish in self.features} <= features
        )


def search_hotels(
    db: sqlite3.Connection,
    location: Annotated[str | None, "a city, a country, or part of a name or an address"] = None,
    property_types: Annotated[list[str] | None, "such as Hotel, Apartment, Resort, Hostel"] = None,
    check_in_date: Annotated[str | None, "YYYY-MM-DD; with check_out_date, only free rooms"] = None,
    check_out_date: Annotated[str | None, "YYYY-MM-DD"] = None,
    adults: Annotated[int, "guests who are adults, in all rooms together"] = 1,
    children: Annotated[int, "guests who are children, in all rooms together"] = 0,
    rooms: Annotated[int, "how many rooms"] = 1,
    min_price: Annotated[float | None, "dollars a night, of the cheapest fitting room"] = None,
    max_price: Annotated[float | None, "dollars a night, of the cheapest fitting room"] = None,
    min_rating: Annotated[float | None, "lowest average guest rating, of 10"] = None,
    min_stars: Annotated[float | None, "lowest star rating"] = None,
    max_stars: Annotated[float | None, "highest star rating"] = None,
    features: Annotated[list[str] | None, "amenities or facilities that it must all have"] = None,
    sort_by: Annotated[
        str,
        "top_reviewed, best_reviewed_lowest_price, most_reviews, price_lowest, price_highest, "
        "stars_highest or stars_lowest",
    ] = "top_reviewed",
    page: Annotated[int, "from 1"] = 1,
    page_size: Annotated[int, "at most 50"] = 10,
) -> dict[str, Any]:
    """Search hotels. `features` are amenities and facilities, such as Breakfast Included, Pool."""
    if sort_by not in SORTS:
        raise ToolError(f"sort_by must be one of {', '.join(SORTS)}")
    if page < 1 or not 1 <= page_size <= MAX_PAGE:
        raise ToolError(f"page must be at least 1 and page_size between 1 and {MAX_PAGE}")
    party = Party.from_request(adults, children, rooms, check_in_date, check_out_date)
    wishes = HotelFilter(
        property_types or (), min_price, max_price, min_rating, min_stars, max_stars, features or ()
    )
    found = _filter_hotels(db, _with_prices(db, _hotels_at(db, location), party), wishes)
    found.sort(key=lambda hotel: (SORTS[sort_by](hotel), hotel["id"]))
    start = (page - 1) * page_size
    return {"total": len(found), "hotels": found[start : start + page_size]}


def search_locations(
    db: sqlite3.Connection, name: Annotated[str, "part of a city's or neighbourhood's name"]
) -> list[Row]:
    """Find cities and neighbourhoods by name, with their coordinates."""
    return select_rows(
        db,
        """select name, type, city, country, latitude, longitude from locations
           where name like ? order by type, name""",
        (like_pattern(name),),
    )


def count_listings(db: sqlite3.Connection) -> list[Row]:
    """How many properties each city has, with its country; most first."""
    return select_rows(
        db,
        """select country, city, count(*) as listings from hotels where is_active = 1
           group by country, city order by listings desc, city""",
    )


def search_hotels_on_map(
    db: sqlite3.Connection,
    latitude: Annotated[float, "of the centre"],
    longitude: Annotated[float, "of the centre"],
    radius_km: Annotated[float, "how far from the centre"],
    check_in_date: Annotated[str | None, "YYYY-MM-DD; with check_out_date, only free rooms"] = None,
    check_out_date: Annotated[str | None, "YYYY-MM-DD"] = None,
    adults: Annotated[int, "guests who are adults"] = 1,
) -> list[Row]:
    """Find hotels around a point, nearest first."""
    party = Party.from_request(adults, 0, 1, check_in_date, check_out_date)
    return _hotels_around(db, latitude, longitude, radius_km, party)


def get_price_distribution(
    db: sqlite3.Connection,
    latitude: Annotated[float, "of the centre"],
    longitude: Annotated[float, "of the centre"],
    radius_km: Annotated[float, "how far from the centre"],
    check_in_date: Annotated[str, "YYYY-MM-DD"],
    check_out_date: Annotated[str, "YYYY-MM-DD"],
    bucket: Annotated[float, "width of a price range in dollars"] = 50.0,
) -> list[dict[str, Any]]:
    """How many hotels around a point have their cheapest free room in each nightly price range."""
    if bucket < 1:
        raise ToolError("bucket must be at least 1")
    party = Party.from_request(1, 0, 1, check_in_date, check_out_date)
    found = _hotels_around(db, latitude, longitude, radius_km, party)
    counts = Counter(math.floor(hotel["lowest_price"] / bucket) for hotel in found)
    return [
        {"from": index * bucket, "to": (index + 1) * bucket, "hotels": counts[index]}
        for index in sorted(counts)
    ]


def _hotels_around(
    db: sqlite3.Connection, latitude: float, longitude: float, radius_km: float, party: Party
) -> list[Row]:
    centre = Place("", "", latitude, longitude)
    near = [
        {**hotel, "distance_km": round(away, 2)}
        for hotel in _hotels_at(db, None)
        if (away := distance_km(centre, hotel["latitude"], hotel["longitude"])) <= radius_km
    ]
    return sorted(_with_prices(db, near, party), key=lambda hotel: hotel["distance_km"])


def _hotels_at(db: sqlite3.Connection, location: str | None) -> list[Row]:
    like = like_pattern(location or "")
    columns = ("city", "country", "neighborhood", "address", "name")
    condition = " or ".join(f"{column} like ?" for column in columns)
    sql = f"select {_SHOWN} from hotels where is_active = 1 and ({condition})"
    return select_rows(db, sql, (like,) * len(columns))


def _with_prices(db: sqlite3.Connection, hotels: Sequence[Row], party: Party) -> list[Row]:
    """Keep the hotels with a room for the party, each with the price of its cheapest."""
    cheapest: dict[int, float] = {}
    for room in open_rooms(db, party):
        price = cheapest.get(room["hotel_id"], math.inf)
        cheapest[room["hotel_id"]] = min(price, room["base_price"])
    return [
        {**hotel, "lowest_price": cheapest[hotel["id"]]}
        for hotel in hotels
        if hotel["id"] in cheapest
    ]


def _filter_hotels(db: sqlite3.Connection, hotels: Sequence[Row], wishes: HotelFilter) -> list[Row]:
    names = _features_by_hotel(db)
    return [hotel for hotel in hotels if wishes.accepts_hotel(hotel, names.get(hotel["id"], set()))]


def _features_by_hotel(db: sqlite3.Connection) -> dict[int, set[str]]:
    """Names of amenities, and names and categories of facilities, case-folded, by hotel."""
    names: dict[int, set[str]] = {}
    for hotel_id, name in db.execute(
        """select hotel_id, name from hotel_amenities join amenities on id = amenity_id
           union all select hotel_id, name from facilities
           union all select hotel_id, category from facilities"""
    ):
        names.setdefault(hotel_id, set()).add(name.casefold())
    return names


def _is_between(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


TOOLS: dict[str, Tool] = tools_by_name(
    define_tool(search_hotels, read_only=True, idempotent=True),
    define_tool(search_locations, read_only=True, idempotent=True),
    define_tool(count_listings, read_only=True, idempotent=True),
    define_tool(search_hotels_on_map, read_only=True, idempotent=True),
    define_tool(get_price_distribution, read_only=True, idempotent=True),
)
