"""Hotels, rooms and reviews as the seed modules write them down."""

from dataclasses import dataclass

WIFI = "Free WiFi"
PARKING = "Free Parking"
SHUTTLE = "Airport Shuttle"
AIR = "Air Conditioning"
BREAKFAST = "Breakfast Included"
FRONT_DESK = "24-Hour Front Desk"
SELF_CHECK_IN = "Self Check-in"
BEACH = "Beach Access"
COMMON = "Common Area"
LAUNDRY = "Laundry Facilities"
BBQ = "BBQ Facilities"
FITNESS = "Fitness Center"

# Name to category.
AMENITIES = {
    WIFI: "Internet",
    PARKING: "Transport",
    SHUTTLE: "Transport",
    AIR: "Room",
    BREAKFAST: "Food",
    FRONT_DESK: "Service",
    SELF_CHECK_IN: "Service",
    BEACH: "Outdoors",
    COMMON: "Shared space",
    LAUNDRY: "Service",
    BBQ: "Outdoors",
    FITNESS: "Wellness",
}

# Category to the name under which a hotel lists it.
FACILITIES = {
    "Pool": "Swimming Pool",
    "Spa": "Spa and Sauna",
    "Gym": "Gym",
    "Restaurant": "Restaurant",
    "Bar": "Lobby Bar",
    "Business Center": "Business Center",
    "Lounge": "Reading Lounge",
    "Parking": "Garage",
}


@dataclass(frozen=True)
class Room:
    """`price` is dollars a night; an `id` of 0 is given out when the database is built."""

    kind: str
    price: float
    bed: str = "Queen"
    view: str = "City"
    adults: int = 2
    children: int = 2
    count: int = 6
    id: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} with {self.bed} and {self.view} View"


@dataclass(frozen=True)
class Attraction:
    name: str
    kind: str
    km: float


@dataclass(frozen=True)
class Review:
    name: str
    title: str
    comment: str
    rating: float
    date: str


@dataclass(frozen=True)
class Hotel:
    """A hotel as written down. Without `rooms` it has two, from `price` dollars a night."""

    id: int
    name: str
    kind: str
    city: str
    address: str
    stars: float
    rating: float
    reviews: int
    price: float = 150.0
    has: tuple[str, ...] = (WIFI, AIR)
    facilities: tuple[str, ...] = ()
    rooms: tuple[Room, ...] = ()
    near: tuple[Attraction, ...] = ()
    remarks: tuple[Review, ...] = ()
    cancellation: str = "Moderate"
    pets: str = "Not Allowed"
    smoking: str = "Not Allowed"
    check_in: str = "15:00"
    total_rooms: int = 60
    superhost: bool = False
    area: str = ""

    @property
    def all_rooms(self) -> tuple[Room, ...]:
        return self.rooms or (
            Room("Standard Room", self.price),
            Room("Deluxe Room", round(self.price * 1.4, 2), "King"),
        )
