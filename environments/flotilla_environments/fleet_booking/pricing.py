"""Price of a stay: nights times rooms, the rewards discount, and tax on what is left."""

from dataclasses import dataclass
from datetime import date

from flotilla_environments.toolkit import ToolError

TAX = 0.15
CURRENCY = "USD"


@dataclass(frozen=True)
class Quote:
    """Amounts in dollars; the fields are columns of `bookings` and `order_tokens`."""

    base_price: float
    discount_percentage: float
    discount_amount: float
    taxes_fees: float
    total_price: float

    @property
    def columns(self) -> dict[str, float]:
        return {**vars(self), "original_price": self.base_price}


def quote_price(nightly: float, nights: int, rooms: int, discount: float) -> Quote:
    base = round(nightly * nights * rooms, 2)
    saved = round(base * discount, 2)
    taxes = round((base - saved) * TAX, 2)
    return Quote(base, discount, saved, taxes, round(base - saved + taxes, 2))


def parse_date(text: str, name: str) -> date:
    """Parse a date. Raises `ToolError` for anything but YYYY-MM-DD."""
    try:
        parsed = date.fromisoformat(text)
    except ValueError:
        parsed = None
    if parsed is None or len(text) != len("2026-01-31"):
        raise ToolError(f"{name} must be a date as YYYY-MM-DD")
    return parsed


def count_nights(check_in: str, check_out: str) -> int:
    """Count the nights of a stay. Raises `ToolError` for none."""
    nights = (parse_date(check_out, "check_out_date") - parse_date(check_in, "check_in_date")).days
    if nights < 1:
        raise ToolError("check_out_date must be after check_in_date")
    return nights
