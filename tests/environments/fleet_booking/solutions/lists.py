"""Scripted solutions of the tasks that are about wishlists and the account."""

from tests.environments.fleet_booking.solutions.site import Row, Site, Solutions

SUMMER = "Summer Getaways"

SOLUTIONS = Solutions()


@SOLUTIONS.of("l0lotcsdrb9p")
def _(site: Site) -> None:
    wanted = ["Breakfast Included", "24-Hour Front Desk", "Beach Access"]
    found = site.search("Tokyo", min_rating=8.5, max_price=200, features=wanted)
    quiet = [
        hotel
        for hotel in found
        if all(
            "nois" not in review["comment"].lower()
            for review in site.do("get_reviews", hotel_id=hotel["id"])
        )
    ]
    site.new_list("Fun in Tokyo", quiet)


@SOLUTIONS.of("tuxkqy544ztq")
def _(site: Site) -> None:
    (own,) = site.do("list_wishlists")
    for saved in own["hotels"]:
        if "Fitness Center" not in site.features({"id": saved["hotel_id"]}):
            site.do("remove_saved_property", hotel_id=saved["hotel_id"])
    site.do("rename_wishlist", list_name=own["list_name"], new_name="My_favourites")


@SOLUTIONS.of("d5lmzk0wxetw")
def _(site: Site) -> None:
    site.new_list("No Show")
    for stay in site.do("list_bookings", status="no_show"):
        site.save("No Show", [{"id": stay["hotel_id"]}], str(stay["total_price"]))


@SOLUTIONS.of("phhfuxlpeeqm")
def _(site: Site) -> None:
    dates = {"check_in_date": "2026-09-15", "check_out_date": "2026-09-18"}
    found = site.search("Rome", features=["24-Hour Front Desk"], property_types=["Hotel"], **dates)
    flexible = [
        hotel for hotel in found if site.policies(hotel)["cancellation_policy_type"] == "Flexible"
    ]
    site.new_list("Italy Ideas", flexible[:1])


@SOLUTIONS.of("iz3n5yb025jd")
def _(site: Site) -> None:
    renamed = f"{SUMMER} - DO NOT BOOK"
    site.do("rename_wishlist", list_name=SUMMER, new_name=renamed)
    site.do("remove_saved_property", hotel_id=5017)


@SOLUTIONS.of("kol1kwqtljyu")
def _(site: Site) -> None:
    deals = {hotel["id"] for hotel in site.do("get_hotel_deals")[:6]}
    both = [hotel for hotel in site.do("get_featured_hotels")[:6] if hotel["id"] in deals]
    if both:
        site.save(SUMMER, both)
    else:
        site.do("rename_wishlist", list_name=SUMMER, new_name="I hate traveling")


@SOLUTIONS.of("pg48xngtexba")
def _(site: Site) -> None:
    name = "Nearby Attractions for 1-star hostels in Paris"
    site.new_list(name)
    for hostel in site.search(
        "Paris", property_types=["Hostel"], max_stars=1, sort_by="stars_lowest"
    ):
        place = site.near(hostel)[0]
        site.save(name, [hostel], f"{place['name']} - {place['type']}")


@SOLUTIONS.of("oxbom3artbvv")
def _(site: Site) -> None:
    found = site.search("London", property_types=["Resort"], min_stars=5, sort_by="stars_highest")
    site.new_list("Best Resorts in London", found)


@SOLUTIONS.of("ziaa9dbymfn")
def _(site: Site) -> None:
    found = site.search(
        "Chicago",
        adults=3,
        max_price=500,
        check_in_date="2026-02-13",
        check_out_date="2026-02-26",
    )
    for hotel in found:
        rules = site.policies(hotel)
        if rules["pet_policy"] == "Not Allowed" and rules["smoking_policy"] != "Not Allowed":
            site.new_list("Chicago", [hotel])
            return


@SOLUTIONS.of("o6un92vlq4")
def _(site: Site) -> None:
    popular = {hotel["id"] for hotel in site.do("get_popular_hotels")}
    both = [hotel for hotel in site.do("get_featured_hotels") if hotel["id"] in popular]
    site.new_list("Best accommodations ever", both)


@SOLUTIONS.of("x8lohz6b5z3p")
def _(site: Site) -> None:
    site.new_list("Cancelled")
    for stay in site.do("list_bookings", status="cancelled"):
        paid = site.do("list_transactions", booking_id=stay["id"])
        for refund in (row for row in paid if row["transaction_type"] == "Refund"):
            day = refund["processed_at"][:10]
            note = f"{stay['total_price']} | {refund['gateway_transaction_id']} | {day}"
            site.save("Cancelled", [{"id": stay["hotel_id"]}], note)


@SOLUTIONS.of("iykpmwqdx60m")
def _(site: Site) -> None:
    casita = site.search("South Austin Casita")
    deco = site.search("South Beach Art Deco Hotel")
    site.new_list("US City Favorites 2026", casita + deco)
    site.do("delete_wishlist", list_name=SUMMER)
    site.do("list_wishlists")


@SOLUTIONS.of("xiqwadqsge3w")
def _(site: Site) -> None:
    desk = "24-Hour Front Desk"
    five = site.search("Austin", min_stars=5, sort_by="stars_highest")[:5]
    rich = [hotel for hotel in five if len(site.features(hotel)) > 1]
    site.new_list(desk, [hotel for hotel in rich if desk in site.features(hotel)])
    for hotel in rich:
        review = site.do("get_reviews", hotel_id=hotel["id"])[0]
        if "Breakfast Included" in site.features(hotel) and review["rating"] > 8:
            site.save(desk, [hotel])


@SOLUTIONS.of("wkxorwa4v6e")
def _(site: Site) -> None:
    three = site.search("Rome", adults=4, sort_by="stars_highest")[:3]
    for amenity in ("24-Hour Front Desk", "Self Check-in", "Beach Access"):
        site.new_list(amenity, [hotel for hotel in three if amenity in site.features(hotel)])


@SOLUTIONS.of("dytgxrn4rtbd")
def _(site: Site) -> None:
    featured = site.do("get_featured_hotels")
    site.new_list("Best", [hotel for hotel in featured if hotel["star_rating"] > 4])


@SOLUTIONS.of("ucvmmqtkjqea")
def _(site: Site) -> None:
    (own,) = site.do("list_wishlists")
    near = next(saved for saved in own["hotels"] if saved["notes"] == "Close to attractions")
    site.do("remove_saved_property", hotel_id=near["hotel_id"], list_name=own["list_name"])
    hostels = site.search(near["city"], property_types=["Hostel"], min_stars=3)
    site.save(own["list_name"], hostels)


@SOLUTIONS.of("w8gxyhdk8fn")
def _(site: Site) -> None:
    for own in site.do("list_wishlists"):
        site.do("delete_wishlist", list_name=own["list_name"])
    for season in ("Winter", "Spring", "Summer", "Fall"):
        site.new_list(f"{season} 2026")


@SOLUTIONS.of("kytkoybekogm")
def _(site: Site) -> None:
    dates = ("2026-06-04", "2026-06-10")
    party = {"adults": 3, "children": 1, "rooms": 2}
    found = site.search("Paris", features=["Bar", "Gym", "Laundry Facilities"], **party)
    pool = [
        hotel
        for hotel in found
        if any(room["view_type"] == "Pool View" for room in site.rooms(hotel, dates, **party))
    ]
    site.new_list("pool", pool)


@SOLUTIONS.of("i6wtfbbsn60g")
def _(site: Site) -> None:
    site.new_list("Anniversary in Paris")
    kinds = ["Villa", "Resort"]
    first = site.search("Latin Quarter", property_types=kinds, min_price=300, max_price=600)
    first = first or site.search(
        "Champs-Élysées", property_types=kinds, min_price=300, max_price=600
    )
    second = site.search(
        "Le Marais", property_types=["Hotel"], max_price=300, sort_by="stars_highest"
    )
    best = [hotel for hotel in second if hotel["star_rating"] == second[0]["star_rating"]]
    site.save("Anniversary in Paris", first + best)


@SOLUTIONS.of("iii6z2srqang")
def _(site: Site) -> None:
    site.do("delete_wishlist", list_name=SUMMER)
    found = site.search(
        "Boston", property_types=["Cottage"], max_price=1200, min_rating=8, min_stars=4
    )
    site.new_list("New travel plans", found[:2])


@SOLUTIONS.of("veodp1uvi4f")
def _(site: Site) -> None:
    largest: Row = max(site.do("get_hotel_deals"), key=lambda hotel: hotel["total_rooms"])
    policy = site.policies(largest)["cancellation_policy_type"]
    name = "Largest hotel for a conference"
    site.new_list(name)
    note = f"Total rooms: {largest['total_rooms']}, Cancellation policy: {policy}"
    site.save(name, [largest], note)


@SOLUTIONS.of("gswda6gcgez")
def _(site: Site) -> None:
    name = "London Trips"
    site.new_list(name)
    motels = site.search(
        "London",
        property_types=["Motel"],
        min_rating=9,
        sort_by="price_lowest",
        check_in_date="2026-08-20",
        check_out_date="2026-08-21",
    )
    site.save(name, motels[:1], "Road trip stop")
    majestic = site.search("Majestic", property_types=["Hotel"], sort_by="price_lowest")[0]
    reviews = site.do("get_reviews", hotel_id=majestic["id"])
    rami = next(review for review in reviews if review["reviewer_name"] == "Rami Perry")
    site.save(name, [majestic], rami["title"])


@SOLUTIONS.of("it6ouuspr7ww")
def _(site: Site) -> None:
    found = site.search(
        "Chicago",
        property_types=["Hotel"],
        min_stars=4,
        max_stars=4.5,
        max_price=150,
        adults=2,
        features=["Spa", "Pool"],
        check_in_date="2026-02-10",
        check_out_date="2026-02-15",
    )
    site.new_list("surprise dude", found[:1])


@SOLUTIONS.of("rhcfbhhfwhx")
def _(site: Site) -> None:
    three = site.search("Tokyo", adults=2, min_stars=5, sort_by="stars_highest")[:3]
    chosen = [hotel for hotel in three if "Restaurant" in site.features(hotel)]
    site.new_list("Tokyo is fun", chosen)
    site.do("update_profile", phone="+10009998888")


@SOLUTIONS.of("kknvdjitvlvz")
def _(site: Site) -> None:
    found = site.search(
        "Marais",
        property_types=["Hotel", "Apartment"],
        min_stars=5,
        min_rating=9.1,
        check_in_date="2026-03-06",
        check_out_date="2026-03-09",
    )
    site.new_list("Paris walkable neighborhoods", found)


@SOLUTIONS.of("m2fcdd9yauen")
def _(site: Site) -> None:
    found = site.search(
        "United States",
        adults=3,
        min_stars=5,
        max_price=120.99,
        check_in_date="2026-07-01",
        check_out_date="2026-07-31",
    )
    site.new_list("USA", found)
