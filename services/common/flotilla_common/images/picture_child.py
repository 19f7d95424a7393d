"""Child process that reads files of pictures, one after the other, under its own limits.

An answer is a line of JSON: the picture, or why it is refused. The bytes of one that was written
anew follow the line."""

import json
import resource
import signal
from collections.abc import Iterator
from typing import BinaryIO

from flotilla_common.images.picture_files import PictureRefused, read_picture
from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.process.private_process import keep_private

CPU_S = 10.0
MEMORY_BYTES = 2**31
# Bytes of the number before each file, which is its length.
LENGTH_BYTES = 8


def main() -> None:
    keep_private()
    parent = ParentChannel()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for data in _read_files(parent.requests):
        # Its default action ends this process, even inside a decoder.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = _answer_file(data)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        parent.write(answer)


def _read_files(requests: BinaryIO) -> Iterator[bytes]:
    """Yield files until the parent ends, which may be in the middle of one."""
    while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        length = int.from_bytes(head)
        if len(data := requests.read(length)) < length:
            return
        yield data


def _answer_file(data: bytes) -> bytes:
    try:
        picture = read_picture(data)
    except PictureRefused as error:
        return json.dumps({"refused": str(error)}).encode() + b"\n"
    anew = b"" if picture.data == data else picture.data
    head = {
        "picture": [picture.sha256, picture.mime, picture.width, picture.height],
        "bytes": len(anew),
    }
    return json.dumps(head).encode() + b"\n" + anew


if __name__ == "__main__":
    main()
