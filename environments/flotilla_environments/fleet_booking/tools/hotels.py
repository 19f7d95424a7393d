"""Reading about one hotel: its facts, free rooms, rules, surroundings and reviews."""

import sqlite3
from typing import Annotated, Any

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.pricing import count_nights, quote_price
from flotilla_environments.fleet_booking.tools.availability import Party, open_rooms
from flotilla_environments.fleet_booking.tools.discount import discount_of
from flotilla_environments.fleet_booking.tools.rows import omit_columns, require_row, select_rows
from flotilla_environments.toolkit import Tool, define_tool, tools_by_name

HotelId = Annotated[int, "id of the hotel"]


def get_hotel(db: sqlite3.Connection, hotel_id: HotelId) -> dict[str, Any]:
    """All about a hotel: address, ratings, host, number of rooms, amenities and facilities."""
    hotel = require_row(db, "hotels", hotel_id)
    host = require_row(db, "hosts", hotel["host_id"])
    return {
        **omit_columns(hotel, "host_id", "is_active", "created_at", "updated_at"),
        "host": {"name": host["name"], "is_superhost": bool(host["is_superhost"])},
        "amenities": [
            row["name"]
            for row in select_rows(
                db,
                """select name from hotel_amenities join amenities on id = amenity_id
                   where hotel_id = ? order by name""",
                (hotel_id,),
            )
        ],
        "facilities": select_rows(
            db, "select name, category from facilities where hotel_id = ? order by id", (hotel_id,)
        ),
    }


def get_hotel_images(db: sqlite3.Connection, hotel_id: HotelId) -> list[Row]:
    """Addresses and captions of a hotel's pictures."""
    require_row(db, "hotels", hotel_id)
    return select_rows(db, "select url, caption from hotel_images where hotel_id = ?", (hotel_id,))


def check_availability(
    db: sqlite3.Connection,
    hotel_id: HotelId,
    check_in_date: Annotated[str, "YYYY-MM-DD"],
    check_out_date: Annotated[str, "YYYY-MM-DD"],
    adults: Annotated[int, "guests who are adults, in all rooms together"] = 1,
    children: Annotated[int, "guests who are children, in all rooms together"] = 0,
    rooms: Annotated[int, "how many rooms of the same kind"] = 1,
) -> list[dict[str, Any]]:
    """The kinds of room that are free for the stay, cheapest first, with what the stay costs."""
    require_row(db, "hotels", hotel_id)
    party = Party.from_request(adults, children, rooms, check_in_date, check_out_date)
    nights, discount = count_nights(check_in_date, check_out_date), discount_of(db).percentage
    return [
        {
            **omit_columns(room, "hotel_id", "created_at", "available_count"),
            "total_price": quote_price(room["base_price"], nights, rooms, discount).total_price,
        }
        for room in open_rooms(db, party, hotel_id)
    ]


def get_property_policies(db: sqlite3.Connection, hotel_id: HotelId) -> dict[str, Any]:
    """Check-in and check-out times, and the rules on cancelling, pets and smoking."""
    require_row(db, "hotels", hotel_id)
    rows = select_rows(db, "select * from property_policies where hotel_id = ?", (hotel_id,))
    return omit_columns(rows[0], "id", "created_at")


def get_nearby_attractions(db: sqlite3.Connection, hotel_id: HotelId) -> list[Row]:
    """What is near a hotel, nearest first: name, type, distance and minutes on foot."""
    require_row(db, "hotels", hotel_id)
    return select_rows(
        db,
        """select name, type, distance_km, walking_minutes from nearby_attractions
           where hotel_id = ? order by distance_km""",
        (hotel_id,),
    )


def get_reviews(
    db: sqlite3.Connection,
    hotel_id: HotelId,
    limit: Annotated[int, "how many at most"] = 10,
) -> list[Row]:
    """Reviews of a hotel, latest stay first."""
    require_row(db, "hotels", hotel_id)
    return select_rows(
        db,
        """select reviewer_name, title, comment, rating, stay_date from reviews
           where hotel_id = ? order by stay_date desc limit ?""",
        (hotel_id, max(0, limit)),
    )


TOOLS: dict[str, Tool] = tools_by_name(
    *(
        define_tool(function, read_only=True, idempotent=True)
        for function in (
            get_hotel,
            get_hotel_images,
            check_availability,
            get_property_policies,
            get_nearby_attractions,
            get_reviews,
        )
    )
)
