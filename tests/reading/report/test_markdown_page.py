"""A page as Markdown: no text of others is markup in it."""

from services.reading.report.markdown_page import render_markdown
from services.reading.report.page import FinishedMarkdown, PageSection, PageTable, Picture, Verbatim


def test_cells_and_headings_show_markup_as_text() -> None:
    hostile = "<script>alert(1)</script> a|b\n[c](d) `e`\x1b]0;title\x07"
    table = PageTable(["task", "pass_at_1"], [[hostile, "50.0% [40.0%, 60.0%]"]])
    lines = render_markdown("Run *x*", [PageSection(hostile, [hostile, table])]).splitlines()
    shown = r"\<script\>alert(1)\</script\> a\|b \[c\](d) \`e\`␛\]0;title␇"
    assert lines[0] == r"# Run \*x\*"
    assert lines[2] == f"## {shown}"
    assert lines[4] == shown
    assert lines[6:9] == [
        "| task | pass_at_1 |",
        "| --- | --- |",
        rf"| {shown} | 50.0% \[40.0%, 60.0%\] |",
    ]


def test_no_line_of_a_listing_ends_it() -> None:
    text = render_markdown(
        "x", [PageSection("y", [Verbatim("a\n```\n<b>"), Picture("c.svg", "d")])]
    )
    assert "\n    a\n    ```\n    <b>\n" in text
    assert text.endswith("![d](c.svg)\n")


def test_an_analysis_keeps_its_markup_below_the_headings_of_the_page() -> None:
    text = render_markdown("x", [PageSection("y", [FinishedMarkdown("# Why\n\n- **a**\n")])])
    assert text.endswith("## y\n\n### Why\n\n- **a**\n")
