"""Files of the repository that an installed launcher brings along, by
services/launcher/ship_files.py."""

from pathlib import Path

from flotilla_launcher.cli.terminal import CommandError

_PACKAGE = Path(__file__).parents[1]
# In an installed package, and in a checkout.
_PLACES = (_PACKAGE / "shipped", _PACKAGE.parents[2])


def find_shipped(name: str) -> Path:
    """Return a file by its path in the repository. Raises CommandError."""
    found = next((place / name for place in _PLACES if (place / name).is_file()), None)
    if found is None:
        raise CommandError(
            f"this installation of Flotilla lacks {name}: install flotilla-rl from its wheel, or"
            " use a checkout"
        )
    return found
