"""Sections as Markdown and as a page, of an analysis or of a report."""

from flotilla_reading.analysis.documents import render_html, render_markdown
from flotilla_reading.analysis.sections import Section

HOSTILE = "<script>alert(1)</script> a|b [c](d) `e`"


def test_no_line_of_a_listing_ends_it_and_none_is_markup() -> None:
    section = Section("x", listing=f"a\n```\n</pre>{HOSTILE}")
    text = render_markdown("t", [section], "w")
    assert text.endswith(f"\n\n    a\n    ```\n    </pre>{HOSTILE}\n")
    page = render_html("t", [section], "w")
    assert "<pre>a\n```\n&lt;/pre&gt;&lt;script&gt;" in page and "<script>" not in page


def test_headings_of_columns_are_text_and_a_picture_of_its_own_file_is_linked() -> None:
    section = Section("x", "", (HOSTILE, "2"), (("3", "4"),), "<svg/>", "curves.svg")
    text = render_markdown("t", [section], "w")
    assert r"| \<script\>alert(1)\</script\> a\|b \[c\](d) \`e\` | 2 |" in text
    assert "![x](curves.svg)" in text and "<svg/>" not in text
    page = render_html("t", [section], "w")
    assert "<svg/>" in page and "<script>" not in page
