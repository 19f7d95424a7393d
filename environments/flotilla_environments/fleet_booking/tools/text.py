"""Normal forms of what people type: phone numbers, e-mail addresses, card numbers."""

import re

_CARD_BRANDS = (
    (re.compile(r"3[47]"), "Amex"),
    (re.compile(r"62"), "UnionPay"),
    (re.compile(r"6011|65"), "Discover"),
    (re.compile(r"5[1-5]|2[2-7]"), "Mastercard"),
    (re.compile(r"4"), "Visa"),
)
_CARD = re.compile(r"[0-9]{13,19}")


def normalize_phone(text: str) -> str:
    """Keep the digits, after a plus where there was one."""
    digits = "".join(character for character in text if character.isdigit())
    return f"+{digits}" if text.strip().startswith("+") else digits


def normalize_email(text: str) -> str:
    return text.strip().lower()


def normalize_card_number(text: str) -> str:
    """Remove spaces and dashes; a text that is still no card number stays as it was typed."""
    compact = re.sub(r"[ -]", "", text)
    return compact if _CARD.fullmatch(compact) else text


def card_brand(number: str) -> str:
    compact = re.sub(r"[ -]", "", number)
    return next((brand for start, brand in _CARD_BRANDS if start.match(compact)), "Other")
