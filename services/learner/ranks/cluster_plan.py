"""Plans that the learner hands to its Ray driver, and the driver to its actors. No Ray."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.common.ray_cluster.machine_resources import ExpectedMachines


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

    @property
    def expected(self) -> ExpectedMachines:
        """The machines to wait for."""
        return ExpectedMachines(
            machines=self.machines,
            workers=self.processes,
            least=self.min_ranks,
            join_s=self.join_s,
            program="services.learner.ranks",
            workers_key="learner.rank.processes",
            remedy="set learner.rank.min_ranks or learner.rank.nodes to what there is",
        )


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """A rank that an actor is to run: slot `slot` of machine `machine`."""

    machine: int
    slot: int
    index: int
    model: str
    revision: str | None
    environment: Mapping[str, str]
