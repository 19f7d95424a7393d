"""Pictures as values, and their places in sequences."""

from dataclasses import dataclass, field

# Patches in time, height and width.
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """PNG or JPEG bytes that engine and trainer decode to the same pixels; `sha256` is of them."""

    sha256: str
    mime: str
    width: int
    height: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a sequence: its hash, its patches, and where its run of tokens begins."""

    sha256: str
    grid: Grid
    offset: int


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture, and its place in the sequence that shows it."""

    picture: Picture
    place: PlacedPicture
