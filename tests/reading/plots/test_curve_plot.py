"""Curves as pictures."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from flotilla_reading.plots.curve_plot import Panel, PlotLine, draw_panels


def test_names_are_shown_as_they_are_and_panels_without_points_are_left_out(tmp_path: Path) -> None:
    lines = [
        PlotLine("an $env", [0, 3], [0.25, 0.75], "o-", "C0", [0.125, 0.5], [0.5, 1.0]),
        PlotLine("_run $x^$", [1], [0.5]),
        PlotLine("<script>", [], []),
    ]
    out = tmp_path / "curves.svg"
    assert draw_panels(out, [Panel("pass@1", lines, is_share=True), Panel("unlogged", [])])
    picture = out.read_text()
    # The labels, which are drawn as paths, are comments.
    assert "<!-- an $env -->" in picture and "<!-- run $x^$ -->" in picture
    assert "pass@1" in picture and "unlogged" not in picture and "script" not in picture


def test_without_any_point_there_is_no_picture(tmp_path: Path) -> None:
    assert not draw_panels(tmp_path / "curves.svg", [Panel("x", [PlotLine("y", [], [])])])
    assert list(tmp_path.iterdir()) == []


def test_hostile_long_and_foreign_names_make_a_picture_without_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    label, (low, high) = "\x1b[31mred\x00 \u202e日本--", ([0, 0], [1, 1])
    lines = [PlotLine(label, [0, 1], [0.5, 0.25], "o", None, low, high)]
    names = ["x" * 300, "\x07<env>&"]
    out = tmp_path / "scores.svg"
    assert draw_panels(out, [Panel("pass@1", lines, is_share=True, names=names)])
    ElementTree.parse(out)
    assert "\x1b" not in out.read_text() and "x" * 60 not in out.read_text()
    assert capfd.readouterr().err == ""
