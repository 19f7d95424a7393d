"""Scripted solutions of the tasks that add a card."""

from tests.environments.fleet_booking.solutions.site import Site, Solutions, guest, of_kind

SOLUTIONS = Solutions()


@SOLUTIONS.of("zoixhuzts8y")
def _(site: Site) -> None:
    dates = ("2026-03-08", "2026-03-11")
    villa = next(
        hotel
        for hotel in site.search("Miami", property_types=["Villa"], adults=7)
        if site.policies(hotel)["pet_policy"] == "Allowed"
    )
    card = site.card("5595310702498422", 9, 2027, "Olivia O'neil", "843", save_for_reuse=False)
    who = guest("Olivia", "O'neil", "olivia.o@hotmail.com", "+1", "8069353213")
    site.book(of_kind(site.rooms(villa, dates, adults=7), "Penthouse"), dates, 7, card, **who)


@SOLUTIONS.of("l8fwxcsixve")
def _(site: Site) -> None:
    dates = ("2026-06-16", "2026-06-20")
    hotel = site.search(
        "Barcelona", features=["Beach Access", "Breakfast Included"], sort_by="stars_highest"
    )[0]
    room = of_kind(site.rooms(hotel, dates, adults=3, rooms=3), "Standard")
    card = site.card("4242424242424242", 9, 2028, "Lucia Mendez", "442")
    who = guest("Lucia", "Mendez", "l.mendez@euro-tech.es", "+1", "555-555-2363")
    site.book(room, dates, 3, card, room_count=3, **who)
    site.do("update_profile", date_of_birth="1981-10-10")
    site.new_list("Barcelona Expansion", [hotel])
    site.do("delete_wishlist", list_name="Summer Getaways")


@SOLUTIONS.of("fivgroqoqpzi")
def _(site: Site) -> None:
    dates = ("2026-05-09", "2026-05-12")
    hotel = site.search("Paris", features=["Gym", "Breakfast Included"], adults=2)[0]
    card = site.card("4000056655665556", 5, 2029, "Daniel Carter", "163")
    who = guest("Daniel", "Carter", "daniel.carter@samplemail.com", "+1", "(617) 555-0148")
    site.book(of_kind(site.rooms(hotel, dates, adults=2), "Family"), dates, 2, card, **who)


@SOLUTIONS.of("gkfmwzwrlwtm")
def _(site: Site) -> None:
    dates = ("2026-03-03", "2026-03-06")
    best = site.search("London")[0]
    card = site.card("5555555555554444", 2, 2028, "Denny Donson", "222")
    who = guest("Denny", "Donson", "dendonson@email.com", "+1", "222-334-5566")
    site.book(site.rooms(best, dates)[0], dates, 1, card, **who)


@SOLUTIONS.of("ifaqsjetg3h")
def _(site: Site) -> None:
    dates = ("2026-04-12", "2026-04-18")
    resort = site.search(
        "Champs-Élysées", property_types=["Resort"], max_price=600, sort_by="stars_highest"
    )[0]
    king = next(r for r in site.rooms(resort, dates, adults=2) if r["bed_type"] == "King")
    home = site.do("get_profile")["address"]
    card = site.card("371449635398431", 12, 2029, "Claire Moore", "4201", billing_address=home)
    who = guest("Claire", "Moore", "CMoore@synapse.com", "+1", "318-511-8180")
    site.book(king, dates, 2, card, **who)


@SOLUTIONS.of("wen1ccrbcix")
def _(site: Site) -> None:
    dates = ("2026-05-02", "2026-05-05")
    best = site.search(
        "Rome",
        property_types=["Bed & Breakfast"],
        min_rating=9,
        min_stars=3,
        sort_by="stars_highest",
    )[0]
    assert any(place["name"] == "Concert Hall" for place in site.near(best))
    room = of_kind(site.rooms(best, dates), "Deluxe")
    card = site.card("4242 4242 4242 4242", 12, 2028, "Charles Moore", "121", save_for_reuse=False)
    site.book(room, dates, 1, card if room["total_price"] > 650 else 1)


@SOLUTIONS.of("ijbuy54d2t5a")
def _(site: Site) -> None:
    dates = ("2026-03-08", "2026-03-13")
    hotel = site.search("Avenue de la Bourdonnais", features=["Common Area"])[0]
    garden = next(r for r in site.rooms(hotel, dates) if r["view_type"] == "Garden View")
    card = site.card("5144308039386670", 1, 2027, "Maria Garcia", "607", save_for_reuse=False)
    who = guest("Maria", "Garcia", "maria_garcia@me.com", "+1", "3342996374")
    site.book(garden, dates, 1, card, **who)


@SOLUTIONS.of("y79awsna5a6")
def _(site: Site) -> None:
    dates, options, pick = (
        ("2026-10-10", "2026-10-14"),
        "Amsterdam - Options",
        "Amsterdam - Final Pick",
    )
    found = site.search(
        "Amsterdam",
        property_types=["Hotel"],
        min_stars=3.5,
        max_stars=4.5,
        features=["Self Check-in", "Spa"],
        sort_by="price_lowest",
    )[:5]
    site.new_list(options, found)
    site.new_list(pick)
    left = []
    for hotel in found:
        rooms = [r for r in site.rooms(hotel, dates) if "Standard" in r["room_type"]]
        if rooms and rooms[0]["total_price"] <= 1200:
            left.append(hotel)
        else:
            site.do("remove_saved_property", hotel_id=hotel["id"], list_name=options)
    best = max(left, key=lambda hotel: hotel["average_rating"])
    site.do("remove_saved_property", hotel_id=best["id"], list_name=options)
    site.save(pick, [best])
    card = site.card("378282246310005", 2, 2029, "Hannah Lee", "7714")
    who = guest("Hannah", "Lee", "hannah.lee@example.com", "+1", "2135550196")
    site.book(of_kind(site.rooms(best, dates), "Standard"), dates, 1, card, **who)


@SOLUTIONS.of("ipdbtdxg8g")
def _(site: Site) -> None:
    card = site.card("371449635398431", 11, 2029, "Tim Green Curry", "2003")
    who = guest("Tim", "Curry", "TGC@gmail.com", "+1", "312-842-8523")
    for city, facility, kind, dates in (
        ("Chicago", "Business Center", "", ("2026-06-27", "2026-07-01")),
        ("Paris", "Gym", "Suite", ("2026-07-01", "2026-07-15")),
    ):
        hotel = site.search(city, features=[facility], min_stars=5, adults=2)[0]
        rooms = [r for r in site.rooms(hotel, dates, adults=2) if r["bed_type"] == "King"]
        site.book(of_kind(rooms, kind), dates, 2, card, **who)


@SOLUTIONS.of("cz5falnutifg")
def _(site: Site) -> None:
    dates = ("2026-01-20", "2026-02-04")
    hotel = next(
        hotel
        for hotel in site.search(
            "Amsterdam", min_stars=4, adults=2, children=2, features=["Pool", "Restaurant"]
        )
        if site.policies(hotel)["smoking_policy"] == "Not Allowed"
    )
    rooms = site.rooms(hotel, dates, adults=2, children=2)
    room = next(room for room in rooms if 660 <= room["base_price"] <= 670)
    card = site.card("44444444444444444", 1, 2026, "Charles Moore", "121")
    site.book(room, dates, 2, card, children=2)


@SOLUTIONS.of("jxlofckjpdnk")
def _(site: Site) -> None:
    dates = ("2026-01-07", "2026-01-08")
    found = site.search(
        "Portland",
        property_types=["Hotel"],
        min_stars=4.1,
        features=["Breakfast Included", "Common Area"],
    )
    hosted = [
        hotel
        for hotel in found
        if site.do("get_hotel", hotel_id=hotel["id"])["host"]["is_superhost"]
    ]
    card = site.card(
        "4500 9181 5862 4510",
        6,
        2031,
        "Magdalena Kihn",
        "834",
        billing_address="B72 Businessview Street, San Francisco, SF, US",
        billing_postal_code="02301",
    )
    who = guest("Magdalena", "Kihn", "magdakihn61@gmail.com", "+1", "7827654740")
    site.book(of_kind(site.rooms(hosted[0], dates), "Suite"), dates, 1, card, **who)


@SOLUTIONS.of("fvdphlujygzj")
def _(site: Site) -> None:
    dates = ("2026-03-10", "2026-03-12")
    hotel = next(
        hotel
        for hotel in site.search("Mount Fuji")
        if site.policies(hotel)["free_cancellation_hours"] == 24
        and any(place["name"] == "Library" for place in site.near(hotel))
    )
    rooms = site.rooms(hotel, dates, adults=2)
    who = guest("Kenji", "Sato", "kenji.sato@email.jp", "+81", "09055550199")
    site.reserve(of_kind(rooms, "Deluxe"), dates, 2, **who)
    queen = next(room for room in rooms if room["bed_type"] == "Queen")
    site.reserve(queen, dates, 2, children=2, room_count=2, rooms_close_together=True, **who)
    site.card(
        "6200000000000005",
        6,
        2028,
        "Kenji Sato",
        "357",
        billing_address="2-3-5 Umeda, Kita-ku, Osaka-shi, Osaka",
        billing_postal_code="530-0001",
        make_default=True,
    )
    site.new_list("Fuji Reunion 2026", [hotel])


@SOLUTIONS.of("fzwpgj85neh")
def _(site: Site) -> None:
    dates, summer = ("2026-05-20", "2026-05-24"), "Summer Getaways"
    two = site.search(
        "London", property_types=["Hotel"], min_stars=4, min_rating=9, max_price=399.99, adults=2
    )[:2]
    site.save(summer, two)
    cheaper = min(two, key=lambda hotel: hotel["lowest_price"])
    card = site.card("4242424242424242", 12, 2028, "Charles Moore", "123")
    site.book(site.rooms(cheaper, dates, adults=2)[0], dates, 2, card)
    site.do("remove_saved_property", hotel_id=cheaper["id"], list_name=summer)


@SOLUTIONS.of("fzzabsjfnsut")
def _(site: Site) -> None:
    dates = ("2026-02-13", "2026-02-15")
    hotel = site.search("Bangkok", features=["Fitness Center"], max_price=100, min_rating=8.9)[0]
    card = site.card("4406 9897 6476 5968", 4, 2028, "Robert Brown", "002")
    who = guest("Rob", "Key", "robkey@yahoo.com", "+1", "741-562-8963")
    site.book(of_kind(site.rooms(hotel, dates), "Deluxe"), dates, 1, card, **who)


@SOLUTIONS.of("oxbtz0wg8d6")
def _(site: Site) -> None:
    dates = ("2026-06-05", "2026-06-07")
    three = site.search(
        "London",
        property_types=["Guesthouse"],
        features=["BBQ Facilities", "Laundry Facilities"],
        sort_by="stars_highest",
    )[:3]
    site.new_list("June London Guesthouses", three)
    rooms = site.rooms(three[0], dates, adults=2)
    twin = next(room for room in rooms if room["bed_type"] == "2 Twin")
    card = site.card(
        "4242424242424242",
        8,
        2031,
        "Walter White",
        "175",
        billing_address="Albuquerque, New Mexico",
        billing_postal_code="40568",
    )
    who = guest("Walter", "White", "Walter@dea.com", "+1", "5061234759")
    site.book(twin, dates, 2, card, **who)


@SOLUTIONS.of("elzlhcynu9")
def _(site: Site) -> None:
    (old,) = site.do("list_payment_methods")
    new = site.do(
        "add_payment_method",
        card_type="Amex",
        cardholder_name="John Doe",
        card_number="9999 1111 1799",
        expiry_month=11,
        expiry_year=2028,
        billing_address="123 ABC Way",
        billing_postal_code="AAA 333",
    )["payment_method_id"]
    site.do("delete_payment_method", payment_method_id=old["id"])
    for stay in site.do("list_bookings", status="confirmed"):
        site.do("modify_booking", booking_id=stay["id"], payment_method_id=new)
