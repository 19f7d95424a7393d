"""Cities and neighbourhoods, with the coordinates of their centres."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    name: str
    country: str
    latitude: float
    longitude: float
    city: str = ""  # of a neighbourhood


CITIES = {
    place.name: place
    for place in (
        Place("London", "United Kingdom", 51.5074, -0.1278),
        Place("Edinburgh", "United Kingdom", 55.9533, -3.1883),
        Place("Paris", "France", 48.8566, 2.3522),
        Place("Nice", "France", 43.7102, 7.2620),
        Place("Rome", "Italy", 41.9028, 12.4964),
        Place("Venice", "Italy", 45.4408, 12.3155),
        Place("Amsterdam", "Netherlands", 52.3676, 4.9041),
        Place("Barcelona", "Spain", 41.3874, 2.1686),
        Place("Berlin", "Germany", 52.5200, 13.4050),
        Place("Vienna", "Austria", 48.2082, 16.3738),
        Place("Lisbon", "Portugal", 38.7223, -9.1393),
        Place("New York", "United States", 40.7128, -74.0060),
        Place("Chicago", "United States", 41.8781, -87.6298),
        Place("Miami", "United States", 25.7617, -80.1918),
        Place("Boston", "United States", 42.3601, -71.0589),
        Place("Austin", "United States", 30.2672, -97.7431),
        Place("Portland", "United States", 45.5152, -122.6784),
        Place("Seattle", "United States", 47.6062, -122.3321),
        Place("San Francisco", "United States", 37.7749, -122.4194),
        Place("Houston", "United States", 29.7604, -95.3698),
        Place("Orlando", "United States", 28.5384, -81.3789),
        Place("Cancun", "Mexico", 21.1619, -86.8515),
        Place("Toronto", "Canada", 43.6532, -79.3832),
        Place("Tokyo", "Japan", 35.6762, 139.6503),
        Place("Mount Fuji", "Japan", 35.4980, 138.7690),
        Place("Bangkok", "Thailand", 13.7563, 100.5018),
        Place("Singapore", "Singapore", 1.3521, 103.8198),
        Place("Dubai", "United Arab Emirates", 25.2048, 55.2708),
        Place("Sydney", "Australia", -33.8688, 151.2093),
    )
}

NEIGHBORHOODS = {
    place.name: place
    for place in (
        Place("SoHo", "United States", 40.7233, -74.0030, "New York"),
        Place("Chelsea", "United States", 40.7465, -74.0014, "New York"),
        Place("Le Marais", "France", 48.8590, 2.3620, "Paris"),
        Place("Latin Quarter", "France", 48.8488, 2.3460, "Paris"),
        Place("Champs-Élysées", "France", 48.8698, 2.3075, "Paris"),
        Place("Shinjuku", "Japan", 35.6938, 139.7034, "Tokyo"),
        Place("Ginza", "Japan", 35.6717, 139.7650, "Tokyo"),
        Place("Trastevere", "Italy", 41.8897, 12.4692, "Rome"),
        Place("Jordaan", "Netherlands", 52.3747, 4.8797, "Amsterdam"),
        Place("Capitol Hill", "United States", 47.6253, -122.3222, "Seattle"),
    )
}
