"""Roster of a run's serving replicas and their addresses. Pure; the newest incarnation of a
replica wins."""

from collections import deque
from dataclasses import dataclass, replace

from flotilla_launcher.state import ReplicaKey

# Replaced incarnations to remember, so that they are refused if they return.
REMEMBERED = 4096
# Far more replicas than any run has.
MOST_MEMBERS = 4096


class TooManyMembersError(Exception):
    """Raised when more replicas register than any run has."""


class ReplacedError(Exception):
    """Raised when another incarnation has replaced the caller."""


class UnregisteredError(Exception):
    """Raised for a heartbeat of an unregistered replica."""


@dataclass(frozen=True, slots=True)
class Member:
    """One registered replica."""

    service: str
    replica: int
    incarnation: str
    address: str
    serving: bool = False
    last_beat: float = 0.0
    metrics_address: str = ""

    @property
    def key(self) -> ReplicaKey:
        return (self.service, self.replica)


class Roster:
    """Replicas of one run. `version` grows with every change that is visible to peers."""

    def __init__(self) -> None:
        self._members: dict[ReplicaKey, Member] = {}
        self._replaced: deque[str] = deque(maxlen=REMEMBERED)
        self.version = 0

    def register_member(self, member: Member) -> None:
        """Add a member. Raises ReplacedError for an incarnation that was replaced before."""
        if member.incarnation in self._replaced:
            raise ReplacedError(member.incarnation)
        known = self._members.get(member.key)
        if known is not None and known.incarnation == member.incarnation:
            member = replace(member, serving=known.serving)
        elif known is None and len(self._members) >= MOST_MEMBERS:
            raise TooManyMembersError(f"{len(self._members)} replicas are registered already")
        elif known is not None:
            self._replaced.append(known.incarnation)
        self._put_member(member)

    def record_heartbeat(
        self, key: ReplicaKey, incarnation: str, serving: bool, now: float
    ) -> bool:
        """Record a heartbeat. Return False if this incarnation must register (again) first."""
        known = self._members.get(key)
        if incarnation in self._replaced:
            raise ReplacedError(incarnation)
        if known is None:
            return False
        if known.incarnation != incarnation:
            raise ReplacedError(incarnation)
        self._put_member(replace(known, serving=serving, last_beat=now))
        return True

    def forget_member(self, key: ReplicaKey) -> None:
        """Forget a member whose process is gone."""
        known = self._members.pop(key, None)
        if known is not None:
            self._replaced.append(known.incarnation)
            self.version += 1

    def serving_members(self, service: str) -> list[Member]:
        """Return the serving replicas of a service, by number."""
        found = [m for m in self._members.values() if m.service == service and m.serving]
        return sorted(found, key=lambda member: member.replica)

    def silent_members(self, now: float, limit_s: float) -> list[Member]:
        """Return the serving members that have sent nothing for longer than `limit_s`."""
        return [m for m in self._members.values() if m.serving and now - m.last_beat > limit_s]

    def _put_member(self, member: Member) -> None:
        known = self._members.get(member.key)
        self._members[member.key] = member
        if known is None or _visible_fields(known) != _visible_fields(member):
            self.version += 1


def _visible_fields(member: Member) -> tuple[str, str, bool]:
    return (member.incarnation, member.address, member.serving)
