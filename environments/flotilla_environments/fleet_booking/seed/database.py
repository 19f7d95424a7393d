"""The database of a data id."""

from collections.abc import Iterator
from functools import cache

from flotilla_environments.database import database_bytes
from flotilla_environments.fleet_booking.schema import SCHEMA
from flotilla_environments.fleet_booking.seed import (
    accounts,
    america,
    asia,
    catalogue,
    europe,
    generated,
    paris_rome,
    stays,
)
from flotilla_environments.fleet_booking.seed.model import Hotel

DATA_IDS = ("kinesis",)


def all_hotels() -> Iterator[Hotel]:
    for part in (europe, paris_rome, america, asia):
        yield from part.HOTELS
    yield from generated.generate_hotels()


@cache
def build_seed_database(data_id: str) -> bytes:
    """Build the SQLite file of a data id. Raises `ValueError` for an unknown data id."""
    if data_id not in DATA_IDS:
        known = ", ".join(DATA_IDS)
        raise ValueError(f"data id {data_id!r} not found: fleet_booking has {known}")
    tables = catalogue.build_catalogue_tables(all_hotels()) | accounts.build_account_tables()
    rooms: dict[int, list[dict]] = {}
    for room in tables["rooms"]:
        rooms.setdefault(room["hotel_id"], []).append(room)
    users = {user["id"]: user for user in tables["users"]}
    return database_bytes(SCHEMA, tables | stays.build_stay_tables(rooms, users))
