"""Bookings with their payments, refunds and cancellations."""

from dataclasses import dataclass

from flotilla_environments.app import Row
from flotilla_environments.fleet_booking.pricing import CURRENCY, TAX

# A new row gets the number after these, as on a site with a longer past.
LAST_TRANSACTION = 4401
LAST_CANCELLATION = 479


@dataclass(frozen=True)
class Stay:
    """`total` in dollars with taxes; `refund` is what the gateway called it, and its day."""

    id: int
    hotel: int
    check_in: str
    check_out: str
    total: float
    status: str
    user: int = 1
    card: int = 1
    room: int = 0  # 0 is the hotel's first room
    paid: bool = True
    purpose: str = "Leisure"
    adults: int = 2
    reference: str = ""
    refund: tuple[str, str] | None = None

    @property
    def payment_status(self) -> str:
        if self.refund is not None:
            return "refunded"
        return "paid" if self.paid else "unpaid"


STAYS = (
    Stay(118, 14686, "2024-12-18", "2024-12-20", 256.58, "cancelled",
         refund=("sq_34366355700690374282", "2024-12-11")),
    Stay(171, 14552, "2025-01-04", "2025-01-07", 515.75, "cancelled",
         refund=("pi_qt8jdnsynu7mmsjrvzblw5rx", "2024-12-21")),
    Stay(240, 14857, "2025-01-20", "2025-01-28", 1629.14, "cancelled",
         refund=("sq_02323273135506274041", "2025-01-07")),
    Stay(302, 2102, "2026-03-14", "2026-03-16", 308.20, "confirmed"),
    Stay(517, 18303, "2025-08-02", "2025-08-05", 417.45, "cancelled", paid=False),
    Stay(866, 8024, "2025-02-10", "2025-02-13", 336.19, "no_show"),
    Stay(1094, 5342, "2025-05-01", "2025-05-08", 1777.16, "no_show"),
    Stay(1533, 11396, "2025-11-12", "2025-11-15", 441.60, "completed", adults=1),
    Stay(2008, 17847, "2026-02-20", "2026-02-22", 434.70, "confirmed"),
    Stay(2877, 8259, "2026-06-06", "2026-06-07", 122.27, "confirmed", room=16365,
         reference="BKSU352300"),
    Stay(4332, 8801, "2026-04-22", "2026-04-25", 948.75, "confirmed", purpose="Business", adults=1),
    Stay(4471, 2932, "2026-07-01", "2026-07-05", 1564.0, "confirmed", user=8, card=12),
    Stay(5193, 6370, "2026-02-11", "2026-02-14", 1311.0, "confirmed", user=9, card=81),
)  # fmt: skip


def build_stay_tables(rooms: dict[int, list[Row]], users: dict[int, Row]) -> dict[str, list[Row]]:
    """Build the tables of bookings; `rooms` by hotel, `users` by id."""
    transactions = [row for stay in STAYS for row in _transaction_rows(stay)]
    cancelled = [stay for stay in STAYS if stay.status == "cancelled"]
    for row, number in zip(reversed(transactions), range(LAST_TRANSACTION, 0, -1), strict=False):
        row["id"] = number
    return {
        "bookings": [_booking_row(stay, rooms[stay.hotel], users[stay.user]) for stay in STAYS],
        "transactions": transactions,
        "cancellations": [
            _cancellation_row(stay, LAST_CANCELLATION - len(cancelled) + position)
            for position, stay in enumerate(cancelled, 1)
        ],
    }


def _booking_row(stay: Stay, rooms: list[Row], user: Row) -> Row:
    base = round(stay.total / (1 + TAX), 2)
    booked = f"{int(stay.check_in[:4]) - 1}-12-01 12:00:00"
    return {
        "id": stay.id,
        "booking_reference": stay.reference or f"BK{stay.id:04d}{stay.hotel:06d}",
        "user_id": stay.user,
        "hotel_id": stay.hotel,
        "room_id": stay.room or rooms[0]["id"],
        "check_in_date": stay.check_in,
        "check_out_date": stay.check_out,
        "booking_date": booked,
        "adults": stay.adults,
        "children": 0,
        "room_count": 1,
        "base_price": base,
        "taxes_fees": round(stay.total - base, 2),
        "total_price": stay.total,
        "currency": CURRENCY,
        "status": stay.status,
        "payment_status": stay.payment_status,
        "special_requests": None,
        "purpose_of_trip": stay.purpose,
        "guest_first_name": user["first_name"],
        "guest_last_name": user["last_name"],
        "guest_email": user["email"],
        "guest_country": user["country"],
        "payment_method_id": stay.card if stay.paid else None,
        "agreed_to_terms": 1,
        "agreed_to_terms_at": booked,
        "original_price": base,
        "created_at": booked,
        "updated_at": booked,
    }


def _transaction_rows(stay: Stay) -> list[Row]:
    if not stay.paid:
        return []
    booked = f"{int(stay.check_in[:4]) - 1}-12-01 12:00:00"
    rows = [_transaction_row(stay, "Payment", f"ch_{stay.id:024d}", booked)]
    if stay.refund is not None:
        gateway_id, day = stay.refund
        rows.append(_transaction_row(stay, "Refund", gateway_id, f"{day} 10:00:00"))
    return rows


def _transaction_row(stay: Stay, kind: str, gateway_id: str, at: str) -> Row:
    return {
        "id": 0,
        "booking_id": stay.id,
        "payment_method_id": stay.card,
        "amount": stay.total,
        "currency": CURRENCY,
        "transaction_type": kind,
        "status": "Success",
        "gateway_response": "approved",
        "gateway_transaction_id": gateway_id,
        "processed_at": at,
    }


def _cancellation_row(stay: Stay, number: int) -> Row:
    day = stay.refund[1] if stay.refund else stay.check_in
    return {
        "id": number,
        "booking_id": stay.id,
        "cancelled_by": "Guest",
        "cancellation_date": f"{day} 09:00:00",
        "reason": "Change of plans",
        "refund_amount": stay.total if stay.refund else 0.0,
        "penalty_amount": 0.0,
        "refund_status": "Processed" if stay.refund else "Not applicable",
        "notes": None,
        "created_at": f"{day} 09:00:00",
    }
