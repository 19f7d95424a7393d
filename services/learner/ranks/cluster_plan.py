"""Plans that the learner hands to its Ray driver, and the driver to its actors. No Ray."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Offered by a further machine for each of its ranks.
RANK_RESOURCE = "flotilla_rank"
_MACHINE_RESOURCE = "flotilla_machine_"


def machine_resource(number: int) -> str:
    """Return the resource that machine `number` alone offers."""
    return f"{_MACHINE_RESOURCE}{number}"


def machine_number(resources: Iterable[str]) -> int | None:
    """Return which machine offers these resources; None for one that is none of ours."""
    for name in resources:
        if name.startswith(_MACHINE_RESOURCE):
            return int(name.removeprefix(_MACHINE_RESOURCE))
    return None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The group of ranks that a driver is to open on the cluster at `address`.

    `machines` counts the learner's own, which has the first `processes` ranks itself. All others
    have as many. With fewer than all, the group is opened after `join_s` if it has `min_ranks`."""

    address: str
    token: str
    run_id: str
    machines: int
    processes: int
    min_ranks: int
    join_s: float
    gpus: bool
    model: str
    revision: str | None
    environment: Mapping[str, str]

    def to_message(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """A rank that an actor is to run: slot `slot` of machine `machine`."""

    machine: int
    slot: int
    index: int
    model: str
    revision: str | None
    environment: Mapping[str, str]
