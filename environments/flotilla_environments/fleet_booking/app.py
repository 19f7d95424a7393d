"""The app: its schema, its tools, and its databases by data id."""

from flotilla_environments.app import DataApp
from flotilla_environments.fleet_booking.seed.database import build_seed_database
from flotilla_environments.fleet_booking.tools import (
    account,
    bookings,
    changes,
    hotels,
    lists,
    search,
    wishlists,
)

KEY = "fleet_booking"

FLEET_BOOKING = DataApp(
    key=KEY,
    tools={
        **search.TOOLS,
        **hotels.TOOLS,
        **lists.TOOLS,
        **wishlists.TOOLS,
        **account.TOOLS,
        **bookings.TOOLS,
        **changes.TOOLS,
    },
    seed=build_seed_database,
)
