"""Where the packages of Flotilla are installed, whichever of them are."""

from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str) -> Path | None:
    """Return the folder of a package by its name, without importing it; None if there is none."""
    top = package.partition(".")[0]
    # Below a package that is missing, `find_spec` raises.
    found = find_spec(package) if find_spec(top) is not None else None
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None
