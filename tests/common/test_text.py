"""Words of others do no harm where they are shown."""

import pytest

from services.common.text import first_line, one_line


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


def test_the_first_line_is_the_first_that_says_anything() -> None:
    assert first_line("\n \x1b[0m\nKeyError: 'id'\nmore", 100) == "KeyError: 'id'"
    assert first_line("\n\n", 100) == ""
