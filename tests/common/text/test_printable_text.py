"""Foreign text does no harm when it is shown."""

import io
import json

import pytest

from flotilla_common.telemetry.log import format_event
from flotilla_common.text.printable_text import (
    first_line,
    json_line,
    make_visible,
    one_line,
    print_visible,
)
from tests.support.hostile_text import SURROGATES, assert_harmless


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("two\n  lines\r\n", "two lines"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x1bcreset", "reset"),
        ("bell\x07 back\x08 c1\x9b2J", "bell back c1 2J"),
        ("right\u202eto left", "right to left"),
        ("žluťoučký 日本", "žluťoučký 日本"),
    ],
)
def test_a_line_has_printable_characters_alone(given: str, shown: str) -> None:
    assert one_line(given, 100) == shown


def test_a_line_is_cut_visibly() -> None:
    assert one_line("x" * 50, 10) == "xxxxxxx..."
    assert one_line("x" * 10, 10) == "x" * 10


def test_the_first_line_is_the_first_with_any_text() -> None:
    assert first_line("\n \x1b[0m\nKeyError: 'id'\nmore", 100) == "KeyError: 'id'"
    assert first_line("\n\n", 100) == ""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b]0;title\x07\r\x00", "␛]0;title␇␍␀"),
        ("\x7f\x9b2J\x85", "␡�2J�"),
        ("\u202eevil\u2066\u200f\u061c", "�evil���"),
        ("\ud800half", "�half"),
        ("unseen\U000e0041\U000e0100\u200b\ufeff\u2060\u00ad", "unseen������"),
        ("\u2028two\u2029", "�two�"),
        ("❤️ क्‍ष", "❤️ क्‍ष"),
        ("žluťoučký 日本 👩‍🚀", "žluťoučký 日本 👩‍🚀"),
    ],
)
def test_what_a_terminal_acts_on_is_shown_as_a_character_of_its_own(given: str, shown: str) -> None:
    assert make_visible(given) == shown
    assert make_visible("a\tb\n", lines=False) == "a␉b␊"


def test_json_is_the_same_value_and_one_harmless_line() -> None:
    line = json_line({SURROGATES: ["\n\t", SURROGATES, "日本"]})
    assert_harmless(line)
    assert "\n" not in line and "日本" in line
    assert json.loads(line) == {SURROGATES: ["\n\t", SURROGATES, "日本"]}


def test_a_line_of_json_is_one_to_every_splitter() -> None:
    text = "a\u2028b\x85c\U000e0041d"
    line = json_line(text)
    assert line.splitlines() == [line] and "\U000e0041" not in line
    assert json.loads(line) == text


def test_a_report_of_half_a_character_can_be_written() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_visible(SURROGATES, file=out)
    out.seek(0)
    assert_harmless(out.read())


def test_a_value_cannot_forge_a_line_of_the_log() -> None:
    event = {"timestamp": "2026-01-01T12:00:00", "level": "info", "event": "called"}
    line = format_event({**event, "name": "x\n12:00:01 error   forged", "exception": "a\n  b"})
    assert line == "12:00:00 info    called name=x␊12:00:01 error   forged\na\n  b"
