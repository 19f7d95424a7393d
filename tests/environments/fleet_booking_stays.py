"""Scripted solutions of the tasks that book a stay with the user's own card or name."""

from tests.environments.fleet_booking_site import Row, Site, guest, solution


def of_kind(rooms: list[Row], kind: str) -> Row:
    """The cheapest room of a kind."""
    return next(room for room in rooms if kind in room["room_type"])


@solution("isk4pu4ojqyb")
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


@solution("zsmm8ndoobtf")
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


@solution("xxknwckzrpfc")
def _(site: Site) -> None:
    dates = ("2026-08-01", "2026-08-05")
    stays = site.do("list_bookings", status="cancelled")
    berlin = next(stay["hotel_id"] for stay in stays if stay["city"] == "Berlin")
    site.do("get_property_policies", hotel_id=berlin)
    site.do("get_nearby_attractions", hotel_id=berlin)
    site.book(of_kind(site.rooms(berlin, dates), "Suite"), dates)


@solution("vh0flnakjsvp")
def _(site: Site) -> None:
    dates = ("2026-06-03", "2026-06-15")
    (own,) = site.do("list_wishlists")
    hostel = next(saved for saved in own["hotels"] if saved["property_type"] == "Hostel")
    site.book(site.rooms(hostel["hotel_id"], dates)[0], dates)


@solution("khmqe7fulpe")
def _(site: Site) -> None:
    dates = ("2026-04-01", "2026-04-10")
    boston = [hotel for hotel in site.do("get_featured_hotels") if hotel["city"] == "Boston"]
    cheapest = min(boston, key=lambda hotel: hotel["lowest_price"])
    site.reserve(site.rooms(cheapest, dates)[0], dates)


@solution("ms1edmwoztd")
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


@solution("wsvtx2wrnl2")
def _(site: Site) -> None:
    dates = ("2026-05-01", "2026-05-03")
    three = site.search(
        "Amsterdam", features=["BBQ Facilities"], sort_by="best_reviewed_lowest_price"
    )[:3]
    hotel = max(three, key=lambda found: found["total_reviews"])
    museum = [place for place in site.near(hotel) if place["name"] == "Modern Art Museum"]
    if museum and site.policies(hotel)["pet_policy"] == "Allowed":
        site.book(site.rooms(hotel, dates)[0], dates)


@solution("n2xuzmc6xefb")
def _(site: Site) -> None:
    dates = ("2026-09-04", "2026-09-07")
    found = site.search(
        "Tokyo", min_stars=5, adults=2, children=2, sort_by="best_reviewed_lowest_price"
    )
    hotel = next(
        hotel for hotel in found if site.policies(hotel)["cancellation_policy_type"] == "Flexible"
    )
    room = site.rooms(hotel, dates, adults=2, children=2)[0]
    request = "Extra pillows and a room far from the elevator"
    site.book(room, dates, 2, children=2, special_requests=request)


@solution("g94opraepbx")
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


@solution("ipugd6a3sse")
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


@solution("tedk9rq2f1yv")
def _(site: Site) -> None:
    dates = ("2026-03-15", "2026-03-30")
    found = site.search(
        "Bangkok", property_types=["Apartment"], min_rating=9.3, sort_by="price_lowest"
    )
    hotel = next(hotel for hotel in found if hotel["total_reviews"] > 500)
    room = next(room for room in site.rooms(hotel, dates) if room["view_type"] == "City View")
    who = guest("Rob", "Key", "Robkey@yahoo.com", "+1", "7415628963")
    site.book(room, dates, **who)


@solution("j4bva9m26guh")
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
    request = "early check-in if possible; arriving on a red-eye flight"
    site.book(room, dates, special_requests=request)
    site.new_list("Tokyo Business Alternatives", [named])


@solution("cad7h107dbtt")
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


@solution("rzduvxiribfl")
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


@solution("jieklemsr1xv")
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
        special_requests="Quiet room away from elevator, extra pillows and blankets",
        rooms_close_together=True,
    )


@solution("kmbwyntsh0y")
def _(site: Site) -> None:
    dates = ("2026-07-01", "2026-07-07")
    found = site.search("Austin", features=["Common Area", "Laundry Facilities"])
    motel = next(hotel for hotel in found if "Ocean View" in hotel["address"])
    if site.policies(motel)["check_in_from"] <= "15:00":
        site.book(site.rooms(motel, dates)[0], dates)
        site.save("Summer Getaways", [motel])


@solution("hxwsamznptxi")
def _(site: Site) -> None:
    dates = ("2026-02-02", "2026-02-04")
    found = site.search(
        "San Francisco",
        features=["24-Hour Front Desk", "Self Check-in", "Laundry Facilities"],
        min_rating=8.5,
        sort_by="price_lowest",
    )
    site.book(site.rooms(found[0], dates)[0], dates)


@solution("leiuic3zased")
def _(site: Site) -> None:
    dates = ("2026-05-06", "2026-05-07")
    deals = [
        hotel
        for hotel in site.do("get_hotel_deals")
        if hotel["city"] == "Singapore" and hotel["average_rating"] >= 9
    ]
    best = max(deals, key=lambda hotel: hotel["total_reviews"])
    suite = of_kind(site.rooms(best, dates, adults=2), "Suite")
    request = "Anniversary celebration - please arrange champagne and rose petals if possible."
    site.book(suite, dates, 2, special_requests=request)


@solution("bspltwp6dktz")
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


@solution("ids1n9lukg0q")
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


@solution("vy3zsio2ankp")
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


@solution("kkq6tfbgajdp")
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


@solution("iz6c4lkkrg2")
def _(site: Site) -> None:
    dates = ("2026-01-16", "2026-01-18")
    found = site.search("Chicago", adults=2, min_stars=5, max_price=249.99)
    hotel = next(
        hotel
        for hotel in found
        if hotel["total_reviews"] > 300 and site.policies(hotel)["pet_policy"] == "Allowed"
    )
    site.book(site.rooms(hotel, dates, adults=2)[0], dates, 2)


@solution("nzsnixwcn8z9")
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
