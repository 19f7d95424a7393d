"""Names of a run's jobs and clusters at SkyPilot, and the owners of names. Pure.

SkyPilot names the cluster of a managed job after its task, cut to 25 characters, and the job's
number. `flo-TAG-SERVICE-REPLICA` fits into these uncut, so any name found at SkyPilot
identifies its owner without a ledger. TAG is three characters for the launcher's runs folder
and six for the run."""

import base64
import hashlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from services.launcher.state import GATEWAY, LEARNER, ROLLOUT, ReplicaKey

PREFIX = "flo"
_OWNER_LENGTH, _RUN_LENGTH = 3, 6
_SLUG_LIMIT = 46
# Length of the UTC time at the end of a run id: `20260131-235959`.
_TIME_LENGTH = 15
_SHORT = {LEARNER: "learner", ROLLOUT: "rollout", GATEWAY: "gateway"}
_LONG = {short: service for service, short in _SHORT.items()}
_NAME = re.compile(
    rf"{PREFIX}-(?P<owner>[a-z2-7]{{{_OWNER_LENGTH}}})(?P<run>[a-z2-7]{{{_RUN_LENGTH}}})"
    rf"-(?:run-.*|(?P<service>{'|'.join(_LONG)})-(?P<replica>\d+)(?:-.*)?)"
)
_MEMBER = re.compile(
    rf"(?<![a-z0-9-]){PREFIX}-[a-z2-7]{{{_OWNER_LENGTH + _RUN_LENGTH}}}"
    rf"-(?:{'|'.join(_LONG)})-\d+(?![a-z0-9-])"
)


@dataclass(frozen=True, slots=True)
class ParsedName:
    """Content of a name: the launcher and run it belongs to, and the replica if it is of one."""

    owner: str
    run: str
    key: ReplicaKey | None


def owner_of(runs: Path) -> str:
    """Return the mark of the launcher of a runs folder: several may share one SkyPilot server."""
    return _short_digest(f"{socket.gethostname()}:{runs.resolve()}", _OWNER_LENGTH)


def run_mark(run_id: str) -> str:
    """Return the mark of a run among all of its launcher."""
    return _short_digest(run_id, _RUN_LENGTH)


def member_name(owner: str, run_id: str, key: ReplicaKey) -> str:
    """Return the name of a replica's task, and in mode `cluster` of its cluster."""
    service, index = key
    return f"{PREFIX}-{owner}{run_mark(run_id)}-{_SHORT[service]}-{index}"


def group_name(owner: str, run_id: str) -> str:
    """Return the name of a run's Job Group, which people look for in SkyPilot's queue."""
    return f"{PREFIX}-{owner}{run_mark(run_id)}-run-{slugify_run_id(run_id)}"


def slugify_run_id(run_id: str) -> str:
    """Return a run id in letters, digits and hyphens, with its time kept where it is too long."""
    text = re.sub(r"[^a-z0-9-]+", "-", run_id.lower())
    if len(text) <= _SLUG_LIMIT:
        return text
    return f"{text[: _SLUG_LIMIT - _TIME_LENGTH - 1]}-{text[-_TIME_LENGTH:]}"


def parse_name(name: str) -> ParsedName | None:
    """Return whose a job or cluster is; None if no launcher of ours gave it that name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    service = found["service"]
    key = (_LONG[service], int(found["replica"])) if service else None
    return ParsedName(found["owner"], found["run"], key)


def learner_name_for(name: str) -> str:
    """Return the name of the learner in a replica's run."""
    owned = parse_name(name)
    mark = "" if owned is None else owned.owner + owned.run
    return f"{PREFIX}-{mark}-{_SHORT[LEARNER]}-0"


def find_member_names(text: str) -> set[str]:
    """Return the names of replicas that stand in a text; those of their clusters do not count."""
    return set(_MEMBER.findall(text))


def _short_digest(text: str, length: int) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:length]
