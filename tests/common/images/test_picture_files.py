"""Odd pictures are kept, written anew, or refused with a reason that a policy can read."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Generator

import numpy as np
import psutil
import pytest
from PIL.Image import Resampling

from flotilla_common.images.picture_files import (
    PictureRefused,
    decode_picture,
    read_picture,
    read_size,
    shrink_picture,
)
from flotilla_common.images.picture_process import PictureProcess
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from tests.common.images.odd_pictures import ANEW, KEPT, ODD, RED, odd_file
from tests.support.process_commands import command_of

_DIGESTS = """
import hashlib, json, sys
from flotilla_common.images.picture_files import decode_picture
found = []
while head := sys.stdin.buffer.read(8):
    data = sys.stdin.buffer.read(int.from_bytes(head, "big"))
    found.append(hashlib.sha256(decode_picture(data).tobytes()).hexdigest())
print(json.dumps(found))
"""
_READ = [name for name, odd in ODD.items() if odd.is_read]


@pytest.fixture(scope="module")
def process() -> Generator[PictureProcess]:
    process = PictureProcess()
    yield process
    process.close()


def pixels_of(data: bytes) -> np.ndarray:
    return np.asarray(decode_picture(data)).astype(int)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_picture_is_kept_or_written_anew_or_refused(
    process: PictureProcess, name: str
) -> None:
    odd, data = ODD[name], odd_file(name)
    if not odd.is_read:
        with pytest.raises(PictureRefused, match=odd.becomes) as refused:
            process.read_picture(data)
        assert len(str(refused.value)) <= 200
        with pytest.raises(PictureRefused, match=re.escape(str(refused.value))):
            read_picture(data)
        return
    picture = process.read_picture(data)
    assert (picture.data == data) == (odd.becomes == KEPT)
    assert picture.mime == ("image/png" if odd.becomes == ANEW else picture.mime)
    assert (picture.width, picture.height) == odd.size == read_size(picture.data)
    assert decode_picture(picture.data).size == odd.size
    assert picture.sha256 == hashlib.sha256(picture.data).hexdigest()
    assert process.read_picture(picture.data) == picture, "what was read is plain"
    assert read_picture(data) == picture


def test_there_are_at_least_40_odd_pictures() -> None:
    assert len(ODD) >= 40


@pytest.mark.parametrize(
    ("name", "at", "color"),
    [
        ("CMYK", (20, 36), RED),
        ("CMYK in TIFF", (20, 36), RED),
        ("a palette", (20, 36), RED),
        ("WebP", (20, 36), RED),
        ("an animated GIF", (20, 36), RED),
        ("16 bits a colour", (20, 36), RED),
        ("a damaged colour profile", (20, 36), RED),
        ("an interlaced PNG", (20, 36), RED),
        # Of the upper left, which is at the upper right once it is turned.
        ("turned by EXIF", (4, 20), (20, 40, 220)),
        ("mirrored by EXIF", (4, 36), (20, 40, 220)),
        ("transparency", (4, 4), RED),
        ("transparency", (20, 36), (255, 255, 255)),
        ("a palette with transparency", (20, 36), (255, 255, 255)),
        ("grey with transparency", (20, 36), (255, 255, 255)),
        ("WebP with transparency", (20, 36), (255, 255, 255)),
        ("one transparent colour", (20, 36), (255, 255, 255)),
        ("16 bits of grey", (12, 0), (128, 128, 128)),
        ("16 bits of grey", (23, 39), (255, 255, 255)),
    ],
)
def test_what_is_written_anew_shows_the_same(
    name: str, at: tuple[int, int], color: tuple[int, int, int]
) -> None:
    assert np.abs(pixels_of(read_picture(odd_file(name)).data)[at] - color).max() <= 12


@pytest.mark.parametrize("name", ODD)
def test_an_odd_picture_shows_the_same_once_it_is_shrunk(name: str) -> None:
    odd, data = ODD[name], odd_file(name)
    side = max(odd.size) // 2
    if not odd.is_read and "bytes are more than" not in odd.becomes:
        with pytest.raises(PictureRefused, match=odd.becomes):
            shrink_picture(data, side)
        return
    if max(odd.size) == 1:
        assert shrink_picture(data, 1) is None
        return
    shrunk = shrink_picture(data, side)
    assert shrunk is not None
    width, height = read_size(shrunk)
    assert max(width, height) == side
    if odd.is_read:
        whole = decode_picture(read_picture(data).data).resize((width, height), Resampling.LANCZOS)
        # JPEG files are decoded at a smaller size in the first place.
        assert np.abs(np.asarray(whole).astype(int) - pixels_of(shrunk)).mean() < 4


def test_the_same_bytes_are_the_same_pixels_in_another_process() -> None:
    pictures = [read_picture(odd_file(name)) for name in _READ]
    given = b"".join(len(each.data).to_bytes(8) + each.data for each in pictures)
    command = python_command("-c", _DIGESTS, executable=sys.executable)
    other = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, env=child_environment(ours=True), check=True
    )
    here = [hashlib.sha256(decode_picture(each.data).tobytes()).hexdigest() for each in pictures]
    assert json.loads(other.stdout) == here


def test_a_killed_process_is_replaced(process: PictureProcess) -> None:
    first = process.read_picture(odd_file("a plain PNG"))
    [child] = _children()
    child.kill()
    psutil.wait_procs([child], timeout=0.2)
    assert process.read_picture(odd_file("a plain PNG")) == first
    assert [other.pid for other in _children()] != [child.pid]


def _children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "flotilla_common.images.picture_child" in command_of(child)
    ]
