"""The site's own lists: featured and popular hotels, deals, trending destinations."""

import sqlite3

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.tools.rows import select_rows
from flotilla_environments.toolkit import Tool, define_tool, tools_by_name

POPULAR = 6
_COLUMNS = """hotels.id, name, property_type, city, country, star_rating, average_rating,
  total_reviews, total_rooms,
  (select min(base_price) from rooms where hotel_id = hotels.id) as lowest_price"""


def get_featured_hotels(db: sqlite3.Connection) -> list[Row]:
    """The hotels that the site features now, in its order."""
    return select_rows(
        db,
        f"""select {_COLUMNS} from featured_hotels join hotels on hotels.id = hotel_id
            order by position""",
    )


def get_popular_hotels(db: sqlite3.Connection) -> list[Row]:
    """The hotels with the most reviews."""
    return select_rows(
        db, f"select {_COLUMNS} from hotels order by total_reviews desc, id limit {POPULAR}"
    )


def get_hotel_deals(db: sqlite3.Connection) -> list[Row]:
    """Hotels with a special offer now, in the site's order."""
    return select_rows(
        db,
        f"""select title, {_COLUMNS} from hotel_deals join hotels on hotels.id = hotel_id
            order by position""",
    )


def get_trending_destinations(db: sqlite3.Connection) -> list[Row]:
    """The cities that were searched most in the past month, most first."""
    return select_rows(
        db,
        """select trending_destinations.city, country, searches_past_month
           from trending_destinations join locations on name = trending_destinations.city
           order by position""",
    )


TOOLS: dict[str, Tool] = tools_by_name(
    *(
        define_tool(function, read_only=True, idempotent=True)
        for function in (
            get_featured_hotels,
            get_popular_hotels,
            get_hotel_deals,
            get_trending_destinations,
        )
    )
)
