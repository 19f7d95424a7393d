"""Scripted solutions of the tasks that book in Europe without a new card."""

from tests.environments.fleet_booking.solutions.site import Site, Solutions, guest, of_kind

SOLUTIONS = Solutions()


@SOLUTIONS.of("zsmm8ndoobtf")
def _(site: Site) -> None:
    dates = ("2026-04-01", "2026-04-05")
    found = site.search("London", features=["Fitness Center"], min_stars=4, max_price=149.99)
    allowed = [
        hotel
        for hotel in found
        if "Downtown Plaza" not in hotel["address"]
        and "Market Street" not in hotel["address"]
        and site.policies(hotel)["pet_policy"] == "Allowed"
    ]
    site.book(site.rooms(allowed[0], dates)[0], dates)


@SOLUTIONS.of("xxknwckzrpfc")
def _(site: Site) -> None:
    dates = ("2026-08-01", "2026-08-05")
    stays = site.do("list_bookings", status="cancelled")
    berlin = next(stay["hotel_id"] for stay in stays if stay["city"] == "Berlin")
    site.do("get_property_policies", hotel_id=berlin)
    site.do("get_nearby_attractions", hotel_id=berlin)
    site.book(of_kind(site.rooms(berlin, dates), "Suite"), dates)


@SOLUTIONS.of("wsvtx2wrnl2")
def _(site: Site) -> None:
    dates = ("2026-05-01", "2026-05-03")
    three = site.search(
        "Amsterdam", features=["BBQ Facilities"], sort_by="best_reviewed_lowest_price"
    )[:3]
    hotel = max(three, key=lambda found: found["total_reviews"])
    museum = [place for place in site.near(hotel) if place["name"] == "Modern Art Museum"]
    if museum and site.policies(hotel)["pet_policy"] == "Allowed":
        site.book(site.rooms(hotel, dates)[0], dates)


@SOLUTIONS.of("g94opraepbx")
def _(site: Site) -> None:
    dates = ("2026-01-25", "2026-01-30")
    two = site.search(
        "Amsterdam",
        features=["24-Hour Front Desk", "Self Check-in"],
        max_price=220,
        min_rating=9.1,
    )[:2]
    site.new_list("Amsterdam Weekend Picks", two)
    spa = next(hotel for hotel in two if "Spa and Sauna" in site.features(hotel))
    who = guest("John", "Doe", "johndoe@gmail.com", "+1", "23456789")
    site.reserve(of_kind(site.rooms(spa, dates), "Deluxe"), dates, **who)


@SOLUTIONS.of("ipugd6a3sse")
def _(site: Site) -> None:
    for city, dates in (
        ("London", ("2026-10-10", "2026-10-12")),
        ("Paris", ("2026-10-14", "2026-10-16")),
        ("Miami", ("2026-10-18", "2026-10-20")),
    ):
        cheapest = site.search(
            city, features=["Breakfast Included"], min_rating=8, sort_by="price_lowest"
        )[0]
        site.book(site.rooms(cheapest, dates)[0], dates, purpose_of_trip="Business")


@SOLUTIONS.of("bspltwp6dktz")
def _(site: Site) -> None:
    dates = ("2026-03-20", "2026-03-26")
    for cottage in site.search("Rome", property_types=["Cottage"]):
        museum = any(
            place["name"] == "Science Museum" and place["distance_km"] <= 1
            for place in site.near(cottage)
        )
        if museum and site.policies(cottage)["smoking_policy"] != "Not Allowed":
            site.book(site.rooms(cottage, dates)[0], dates)
            return


@SOLUTIONS.of("ids1n9lukg0q")
def _(site: Site) -> None:
    dates = ("2026-04-03", "2026-04-06")
    stays = site.do("list_bookings", status="completed")
    rome = next(stay["hotel_id"] for stay in stays if stay["city"] == "Rome")
    rooms = site.rooms(rome, dates)
    room = next(
        room for room in rooms if room["bed_type"] == "Double" and room["view_type"] == "City View"
    )
    site.do("update_profile", phone="+1-318-555-3802")
    site.book(room, dates)
    site.new_list("Business in Seattle", site.search("Capitol Hill Tower"))


@SOLUTIONS.of("kkq6tfbgajdp")
def _(site: Site) -> None:
    dates = ("2026-05-01", "2026-05-05")
    hostel = site.search(
        "London",
        property_types=["Hostel"],
        features=["Laundry Facilities", "Fitness Center"],
        min_rating=9,
    )[0]
    assert any(place["name"] == "Business District" for place in site.near(hostel))
    site.book(site.rooms(hostel, dates)[0], dates)


@SOLUTIONS.of("nzsnixwcn8z9")
def _(site: Site) -> None:
    name, dates = "Linking in London", ("2026-04-01", "2026-04-09")
    three = site.search(
        "London", property_types=["Apartment"], min_price=200, min_rating=8, adults=2
    )[:3]
    site.new_list(name, three)
    richest = max(three, key=lambda hotel: len(site.features(hotel)))
    who = guest("Mariana", "Ayo", "mayo@gmail.com", "+1", "2024498720")
    site.reserve(site.rooms(richest, dates, adults=2)[0], dates, 2, **who)
    site.do("delete_wishlist", list_name=name)


@SOLUTIONS.of("yus7clba4foq")
def _(site: Site) -> None:
    dates = ("2026-04-22", "2026-04-25")
    stays = site.do("list_bookings", status="confirmed")
    business = next(stay for stay in stays if stay["purpose_of_trip"] == "Business")
    site.do("cancel_booking", booking_id=business["id"])
    two = site.search(
        "London", min_stars=4, max_stars=4.5, features=["Pool"], sort_by="price_lowest"
    )[:2]
    best = max(two, key=lambda hotel: hotel["average_rating"])
    site.book(site.rooms(best, dates)[0], dates)
