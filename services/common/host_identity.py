"""The identity of this machine."""

import hashlib
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_digest() -> bytes:
    """Return SHA-256 of boot id and hostname: equal only for processes that share memory.

    Containers of one machine have one boot id but hostnames of their own, and no /dev/shm in
    common."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return hashlib.sha256(f"{boot_id}\n{socket.gethostname()}".encode()).digest()
