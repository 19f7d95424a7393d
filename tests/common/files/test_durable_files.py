"""Files are written whole or not at all."""

from pathlib import Path

import pytest

from flotilla_common.files.durable_files import remove_cut_line, replace_file


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


@pytest.mark.parametrize(
    ("written", "left"),
    [
        (b"", b""),
        (b"a\n", b"a\n"),
        (b"a\nb", b"a\n"),
        (b"a", b""),
        (b"a\n\xff" + b"x" * 100_000, b"a\n"),
    ],
    ids=lambda data: repr(data)[:12],
)
def test_a_line_without_an_end_is_removed(tmp_path: Path, written: bytes, left: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(written)
    remove_cut_line(path)
    assert path.read_bytes() == left
