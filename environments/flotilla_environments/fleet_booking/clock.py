"""The site's clock: it stands still, so that equal calls leave equal databases."""

from datetime import date

TODAY = date(2026, 1, 2)
NOW = f"{TODAY.isoformat()} 09:00:00"
TOKEN_EXPIRES = f"{TODAY.isoformat()} 09:30:00"
