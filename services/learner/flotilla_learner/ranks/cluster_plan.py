"""Plans that the learner passes to its Ray driver, and the driver to its actors. No Ray."""

from collections.abc import Mapping
from dataclasses import dataclass

from flotilla_common.ray_cluster.machine_resources import ExpectedMachines


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Group of ranks for a driver to open on the cluster at `address`.

    `machines` counts the learner's own, which runs the first `processes` ranks itself. All others
    have as many. If machines are missing after `join_s`, the group is opened with `min_ranks`."""

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

    @property
    def expected(self) -> ExpectedMachines:
        """Machines to wait for."""
        return ExpectedMachines(
            machines=self.machines,
            workers=self.processes,
            least=self.min_ranks,
            join_s=self.join_s,
            program="flotilla_learner.ranks",
            workers_key="learner.rank.processes",
            remedy="set learner.rank.min_ranks or learner.rank.nodes to the number available",
        )


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """Rank for an actor to run: slot `slot` of machine `machine`."""

    machine: int
    slot: int
    index: int
    model: str
    revision: str | None
    environment: Mapping[str, str]
