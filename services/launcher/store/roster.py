"""Who serves where, pure: one roster per run, newest incarnation wins."""

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

from services.launcher.state import Key

# Incarnations that were replaced, and are told so should they come back.
REMEMBERED = 4096
# Far more than any run has.
MOST_MEMBERS = 4096


class TooManyMembersError(Exception):
    """More replicas than any run has are registered already."""


class ReplacedError(Exception):
    """Another incarnation has this replica."""


class UnregisteredError(Exception):
    """A heartbeat of a replica that has not registered."""


class Command(StrEnum):
    """What the answer to a heartbeat tells a replica."""

    NONE = "none"
    DRAIN = "drain"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Member:
    """One replica that has announced itself."""

    service: str
    replica: int
    incarnation: str
    address: str
    serving: bool = False
    last_beat: float = 0.0
    metrics_address: str = ""

    @property
    def key(self) -> Key:
        return (self.service, self.replica)


class Roster:
    """The replicas of one run. `version` grows with every change that a peer can see."""

    def __init__(self) -> None:
        self._members: dict[Key, Member] = {}
        self._replaced: deque[str] = deque(maxlen=REMEMBERED)
        self.version = 0

    def register(self, member: Member) -> None:
        """Take a member in. Raises TooManyMembersError, and ReplacedError for an incarnation that
        was replaced before."""
        if member.incarnation in self._replaced:
            raise ReplacedError(member.incarnation)
        known = self._members.get(member.key)
        if known is not None and known.incarnation == member.incarnation:
            member = replace(member, serving=known.serving)
        elif known is None and len(self._members) >= MOST_MEMBERS:
            raise TooManyMembersError(f"{len(self._members)} replicas are registered already")
        elif known is not None:
            self._replaced.append(known.incarnation)
        self._put(member)

    def beat(self, key: Key, incarnation: str, serving: bool, now: float) -> bool:
        """Note a sign of life. False: this incarnation has yet to register (again)."""
        known = self._members.get(key)
        if incarnation in self._replaced:
            raise ReplacedError(incarnation)
        if known is None:
            return False
        if known.incarnation != incarnation:
            raise ReplacedError(incarnation)
        self._put(replace(known, serving=serving, last_beat=now))
        return True

    def forget(self, key: Key) -> None:
        """Its process is gone."""
        known = self._members.pop(key, None)
        if known is not None:
            self._replaced.append(known.incarnation)
            self.version += 1

    def peers(self, service: str) -> list[Member]:
        """The serving replicas of a service, by number."""
        found = [m for m in self._members.values() if m.service == service and m.serving]
        return sorted(found, key=lambda member: member.replica)

    def silent(self, now: float, limit_s: float) -> list[Member]:
        """Serving members from whom nothing was heard for longer than this."""
        return [m for m in self._members.values() if m.serving and now - m.last_beat > limit_s]

    def _put(self, member: Member) -> None:
        known = self._members.get(member.key)
        self._members[member.key] = member
        if known is None or _seen(known) != _seen(member):
            self.version += 1


def _seen(member: Member) -> tuple[str, str, bool]:
    return (member.incarnation, member.address, member.serving)
