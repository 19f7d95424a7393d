"""Where the packages of Flotilla are installed, whichever of them are."""

from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str) -> Path | None:
    """Return the folder of a package by its name, without importing it; None if there is none."""
    found = find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None
