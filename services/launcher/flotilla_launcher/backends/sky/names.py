"""Names of a run's clusters at SkyPilot, and the owners of names. Pure.

A cluster is named `flo-TAG-SERVICE-REPLICA`, and its machines at a cloud the same with more behind
that, so any name found there identifies its owner without a ledger. TAG is three characters for
the launcher's runs folder and six for the run."""

import base64
import hashlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, ReplicaKey

PREFIX = "flo"
_OWNER_LENGTH, _RUN_LENGTH = 3, 6
_SLUG_LIMIT = 46
# Length of the UTC time at the end of a run id: `20260131-235959`.
_TIME_LENGTH = 15
_SHORT = {LEARNER: "learner", ROLLOUT: "rollout", GATEWAY: "gateway"}
_LONG = {short: service for service, short in _SHORT.items()}
_NAME = re.compile(
    rf"{PREFIX}-(?P<owner>[a-z2-7]{{{_OWNER_LENGTH}}})(?P<run>[a-z2-7]{{{_RUN_LENGTH}}})"
    rf"-(?P<service>{'|'.join(_LONG)})-(?P<replica>\d+)(?:-.*)?"
)


@dataclass(frozen=True, slots=True)
class ParsedName:
    """Content of a name: the launcher, the run and the replica that it belongs to."""

    owner: str
    run: str
    key: ReplicaKey


def owner_of(runs: Path) -> str:
    """Return the mark of the launcher of a runs folder: several may share one SkyPilot server."""
    return _short_digest(f"{socket.gethostname()}:{runs.resolve()}", _OWNER_LENGTH)


def run_mark(run_id: str) -> str:
    """Return the mark of a run among all of its launcher."""
    return _short_digest(run_id, _RUN_LENGTH)


def member_name(owner: str, run_id: str, key: ReplicaKey) -> str:
    """Return the name of a replica's cluster, and of its task."""
    service, index = key
    return f"{PREFIX}-{owner}{run_mark(run_id)}-{_SHORT[service]}-{index}"


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
    return ParsedName(found["owner"], found["run"], key)


def _short_digest(text: str, length: int) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:length]
