"""Scripted solutions of the tasks that book outside Europe without a new card."""

from tests.environments.fleet_booking.solutions.site import Site, Solutions, guest, of_kind

SOLUTIONS = Solutions()


@SOLUTIONS.of("isk4pu4ojqyb")
def _(site: Site) -> None:
    dates = ("2026-02-14", "2026-02-16")
    resort = site.search(
        "Tokyo",
        property_types=["Resort"],
        min_stars=4,
        max_stars=4.5,
        features=["Gym"],
        sort_by="best_reviewed_lowest_price",
    )[0]
    room = site.rooms(resort, dates, adults=2)[0]
    site.do(
        "preview_booking",
        room_id=room["id"],
        check_in_date=dates[0],
        check_out_date=dates[1],
        adults=2,
    )
    site.book(room, dates, 2)


@SOLUTIONS.of("vh0flnakjsvp")
def _(site: Site) -> None:
    dates = ("2026-06-03", "2026-06-15")
    (own,) = site.do("list_wishlists")
    hostel = next(saved for saved in own["hotels"] if saved["property_type"] == "Hostel")
    site.book(site.rooms(hostel["hotel_id"], dates)[0], dates)


@SOLUTIONS.of("khmqe7fulpe")
def _(site: Site) -> None:
    dates = ("2026-04-01", "2026-04-10")
    boston = [hotel for hotel in site.do("get_featured_hotels") if hotel["city"] == "Boston"]
    cheapest = min(boston, key=lambda hotel: hotel["lowest_price"])
    site.reserve(site.rooms(cheapest, dates)[0], dates)


@SOLUTIONS.of("ms1edmwoztd")
def _(site: Site) -> None:
    dates = ("2026-02-21", "2026-03-08")
    five = site.search(
        "Bangkok",
        features=["Breakfast Included"],
        max_price=250,
        min_rating=9,
        check_in_date=dates[0],
        check_out_date=dates[1],
    )[:5]
    site.new_list("Birthday in Bangkok", five)
    best = max(five, key=lambda hotel: hotel["average_rating"])
    who = guest("Charlie", "Moore", "cmoore@gmail.com", "+1", "2257089234")
    site.reserve(site.rooms(best, dates)[-1], dates, **who)


@SOLUTIONS.of("n2xuzmc6xefb")
def _(site: Site) -> None:
    dates = ("2026-09-04", "2026-09-07")
    found = site.search(
        "Tokyo", min_stars=5, adults=2, children=2, sort_by="best_reviewed_lowest_price"
    )
    hotel = next(
        hotel for hotel in found if site.policies(hotel)["cancellation_policy_type"] == "Flexible"
    )
    room = site.rooms(hotel, dates, adults=2, children=2)[0]
    request = "Extra pillows, far from the elevator"
    site.book(room, dates, 2, children=2, special_requests=request)


@SOLUTIONS.of("tedk9rq2f1yv")
def _(site: Site) -> None:
    dates = ("2026-03-15", "2026-03-30")
    found = site.search(
        "Bangkok", property_types=["Apartment"], min_rating=9.3, sort_by="price_lowest"
    )
    hotel = next(hotel for hotel in found if hotel["total_reviews"] > 500)
    room = next(room for room in site.rooms(hotel, dates) if room["view_type"] == "City View")
    who = guest("Rob", "Key", "Robkey@yahoo.com", "+1", "7415628963")
    site.book(room, dates, **who)


@SOLUTIONS.of("j4bva9m26guh")
def _(site: Site) -> None:
    dates = ("2026-04-14", "2026-04-18")
    found = site.search("Shinjuku", min_rating=8.5, max_price=350)
    named = next(hotel for hotel in found if "Tranquility" in hotel["name"])
    better = [
        hotel
        for hotel in found
        if hotel["lowest_price"] < named["lowest_price"]
        and hotel["average_rating"] > named["average_rating"]
    ]
    room = of_kind(site.rooms((better or [named])[0], dates), "Standard")
    request = "Early check-in after a red-eye flight"
    site.book(room, dates, special_requests=request)
    site.new_list("Tokyo Business Alternatives", [named])


@SOLUTIONS.of("cad7h107dbtt")
def _(site: Site) -> None:
    dates = ("2026-06-01", "2026-07-14")
    listings = site.do("count_listings")
    by_country: dict[str, int] = {}
    for row in listings:
        by_country[row["country"]] = by_country.get(row["country"], 0) + row["listings"]
    country = max(by_country, key=by_country.__getitem__)
    city = next(row["city"] for row in listings if row["country"] == country)
    found = site.search(
        city,
        property_types=["Hotel", "Apartment"],
        min_stars=4,
        min_rating=8.5,
        features=["24-Hour Front Desk"],
        sort_by="price_lowest",
    )
    hotel = next(
        hotel
        for hotel in found
        if hotel["total_reviews"] >= 300 and site.policies(hotel)["pet_policy"] == "Not Allowed"
    )
    site.book(site.rooms(hotel, dates)[0], dates)


@SOLUTIONS.of("rzduvxiribfl")
def _(site: Site) -> None:
    dates = ("2026-03-20", "2026-03-22")
    soho = site.do("search_locations", name="SoHo")[0]
    circle = {"latitude": soho["latitude"], "longitude": soho["longitude"], "radius_km": 3.0}
    stay = {"check_in_date": dates[0], "check_out_date": dates[1]}
    spread = site.do("get_price_distribution", **circle, **stay)
    below = sum(part["hotels"] for part in spread if part["to"] <= 250)
    assert 2 * below >= sum(part["hotels"] for part in spread)
    three = site.do("search_hotels_on_map", **circle, **stay)[:3]
    best = max(three, key=lambda hotel: hotel["average_rating"])
    site.book(site.rooms(best, dates)[0], dates)


@SOLUTIONS.of("jieklemsr1xv")
def _(site: Site) -> None:
    stays = site.do("list_bookings", status="confirmed")
    stay = next(row for row in stays if row["booking_reference"] == "BKSU352300")
    dates = ("2026-06-07", "2026-06-08")
    rooms = site.rooms(stay["hotel_id"], dates, adults=stay["adults"], rooms=2)
    pool = next(room for room in rooms if room["view_type"] == "Pool View")
    site.do(
        "modify_booking",
        booking_id=stay["id"],
        check_in_date=dates[0],
        check_out_date=dates[1],
        room_id=pool["id"],
        room_count=2,
        special_requests=site.quoted()[0].rstrip("."),
        rooms_close_together=True,
    )


@SOLUTIONS.of("kmbwyntsh0y")
def _(site: Site) -> None:
    dates = ("2026-07-01", "2026-07-07")
    found = site.search("Austin", features=["Common Area", "Laundry Facilities"])
    motel = next(hotel for hotel in found if "Ocean View" in hotel["address"])
    if site.policies(motel)["check_in_from"] <= "15:00":
        site.book(site.rooms(motel, dates)[0], dates)
        site.save("Summer Getaways", [motel])


@SOLUTIONS.of("hxwsamznptxi")
def _(site: Site) -> None:
    dates = ("2026-02-02", "2026-02-04")
    found = site.search(
        "San Francisco",
        features=["24-Hour Front Desk", "Self Check-in", "Laundry Facilities"],
        min_rating=8.5,
        sort_by="price_lowest",
    )
    site.book(site.rooms(found[0], dates)[0], dates)


@SOLUTIONS.of("leiuic3zased")
def _(site: Site) -> None:
    dates = ("2026-05-06", "2026-05-07")
    deals = [
        hotel
        for hotel in site.do("get_hotel_deals")
        if hotel["city"] == "Singapore" and hotel["average_rating"] >= 9
    ]
    best = max(deals, key=lambda hotel: hotel["total_reviews"])
    suite = of_kind(site.rooms(best, dates, adults=2), "Suite")
    request = "Anniversary celebration: champagne, rose petals"
    site.book(suite, dates, 2, special_requests=request)


@SOLUTIONS.of("vy3zsio2ankp")
def _(site: Site) -> None:
    dates = ("2026-01-10", "2026-01-11")
    city = site.do("get_trending_destinations")[0]["city"]
    three = site.search(
        city,
        min_stars=4,
        max_stars=4.5,
        features=["Beach Access", "BBQ Facilities"],
        sort_by="price_lowest",
    )[:3]
    best = max(three, key=lambda hotel: hotel["average_rating"])
    rooms = site.rooms(best, dates)
    site.reserve(next(room for room in rooms if room["view_type"] == "Courtyard View"), dates)


@SOLUTIONS.of("iz6c4lkkrg2")
def _(site: Site) -> None:
    dates = ("2026-01-16", "2026-01-18")
    found = site.search("Chicago", adults=2, min_stars=5, max_price=249.99)
    hotel = next(
        hotel
        for hotel in found
        if hotel["total_reviews"] > 300 and site.policies(hotel)["pet_policy"] == "Allowed"
    )
    site.book(site.rooms(hotel, dates, adults=2)[0], dates, 2)


@SOLUTIONS.of("akyxlzgkg6ex")
def _(site: Site) -> None:
    dates = ("2026-03-01", "2026-03-05")
    cities = [place["city"] for place in site.do("get_trending_destinations")]
    found = site.search(
        next(city for city in cities if city == "Dubai"),
        property_types=["Resort"],
        min_stars=4,
        max_stars=4.5,
        features=["Beach Access", "24-Hour Front Desk"],
        sort_by="most_reviews",
    )
    site.book(of_kind(site.rooms(found[0], dates, adults=2), "Deluxe"), dates, 2)
