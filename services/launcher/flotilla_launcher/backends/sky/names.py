"""Names of a run's clusters at SkyPilot, and the owners of names.

A cluster is named `flo-TAG-SERVICE-REPLICA`, and its machines at a cloud the same with more behind
that, so any name found there identifies its owner without a ledger. TAG is five characters
for the launcher's runs folder and five for the run, as many as no cloud cuts. A runs folder that
was given three keeps them, and its runs have six."""

import base64
import hashlib
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.files.durable_files import replace_file
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, ReplicaKey

PREFIX = "flo"
_OWNER_FILE = ".owner"
_OWNER_LENGTH = 5
# Characters of a run by those of its owner.
_RUN_LENGTHS = {_OWNER_LENGTH: 5, 3: 6}
_SLUG_LIMIT = 46
# Length of the UTC time at the end of a run id: `20260131-235959`.
_TIME_LENGTH = 15
_SHORT = {LEARNER: "learner", ROLLOUT: "rollout", GATEWAY: "gateway"}
_LONG = {short: service for service, short in _SHORT.items()}
_NAME = re.compile(
    rf"{PREFIX}-(?P<tag>[a-z2-7]{{9,10}})-(?P<service>{'|'.join(_LONG)})-(?P<replica>\d+)(?:-.*)?"
)


@dataclass(frozen=True, slots=True)
class ParsedName:
    """Content of a name: the launcher, the run and the replica that it belongs to."""

    owner: str
    run: str
    key: ReplicaKey


def owner_of(runs: Path) -> str:
    """Return the mark of the launcher of a runs folder: several may share one SkyPilot server, or
    one account at a cloud. It is stored in the folder because names of hosts change."""
    path = runs / _OWNER_FILE
    if not path.exists():
        runs.mkdir(parents=True, exist_ok=True)
        # Containers of one image may share the name of their host and the path.
        place = f"{uuid.getnode()}:{socket.gethostname()}:{runs.resolve()}"
        replace_file(path, f"{_short_digest(place, _OWNER_LENGTH)}\n".encode())
    return path.read_text(encoding="utf-8").strip()


def run_mark(owner: str, run_id: str) -> str:
    """Return the mark of a run among all of its launcher, the owner."""
    return _short_digest(run_id, _RUN_LENGTHS[len(owner)])


def member_name(owner: str, run_id: str, key: ReplicaKey) -> str:
    """Return the name of a replica's cluster, and of its task."""
    service, index = key
    return f"{PREFIX}-{owner}{run_mark(owner, run_id)}-{_SHORT[service]}-{index}"


def slugify_run_id(run_id: str) -> str:
    """Return a run id in letters, digits and hyphens, with its time kept where it is too long."""
    text = re.sub(r"[^a-z0-9-]+", "-", run_id.lower())
    if len(text) <= _SLUG_LIMIT:
        return text
    return f"{text[: _SLUG_LIMIT - _TIME_LENGTH - 1]}-{text[-_TIME_LENGTH:]}"


def parse_name(name: str) -> ParsedName | None:
    """Return whose a cluster is; None if no launcher of ours gave it that name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key = (_LONG[found["service"]], int(found["replica"]))
    tag = found["tag"]
    owner_length = next(size for size, rest in _RUN_LENGTHS.items() if size + rest == len(tag))
    return ParsedName(tag[:owner_length], tag[owner_length:], key)


def _short_digest(text: str, length: int) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:length]
