"""The other side of a raw socket: `python -m benchmarks.raw_receiver FILE`.

It answers each payload with one byte, once that is in the file and fsynced; with /dev/null, as soon
as it is there. It prints its port and, when its peer has closed, the CPU seconds that it took."""

import os
import socket
import struct
import sys
import time
from pathlib import Path

LENGTH = struct.Struct("<I")


def main(out: Path) -> None:
    keep = str(out) != os.devnull
    with socket.create_server(("127.0.0.1", 0)) as server, out.open("wb", buffering=0) as file:
        print(server.getsockname()[1], flush=True)
        there, _ = server.accept()
        with there, there.makefile("rb") as incoming:
            began = time.process_time()
            while head := incoming.read(LENGTH.size):
                data = incoming.read(LENGTH.unpack(head)[0])
                if keep:
                    file.write(data)
                    os.fdatasync(file.fileno())
                there.sendall(b"k")
            print(time.process_time() - began)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
