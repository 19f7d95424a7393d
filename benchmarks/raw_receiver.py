"""The other side of a raw socket: `python -m benchmarks.raw_receiver KIND FILE`.

It answers each payload with one byte: a `raw` one on arrival, a `synced` one after it is written to
the file and fsynced. A `decoded` payload is the messages of a submission, which are decoded to a
trajectory with every check and digest before they are written and fsynced. It prints its port and,
after its peer has closed, its CPU seconds."""

import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import IO

from benchmarks.submission import decode_messages

LENGTH = struct.Struct("<I")


def main(kind: str, out: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, out.open("wb", buffering=0) as file:
        print(server.getsockname()[1], flush=True)
        there, _ = server.accept()
        with there, there.makefile("rb") as incoming:
            began = time.process_time()
            while head := incoming.read(LENGTH.size):
                data = incoming.read(LENGTH.unpack(head)[0])
                take_payload(kind, data, file)
                there.sendall(b"k")
            print(time.process_time() - began)


def take_payload(kind: str, data: bytes, file: IO[bytes]) -> None:
    if kind == "raw":
        return
    if kind == "decoded":
        decode_messages(split_messages(data))
    file.write(data)
    os.fdatasync(file.fileno())


def join_messages(messages: list[bytes]) -> bytes:
    """Return messages as one payload, each prefixed with its length."""
    return b"".join(part for each in messages for part in (LENGTH.pack(len(each)), each))


def split_messages(data: bytes) -> list[bytes]:
    found: list[bytes] = []
    start = 0
    while start < len(data):
        (size,) = LENGTH.unpack_from(data, start)
        start += LENGTH.size
        found.append(data[start : start + size])
        start += size
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
