"""What the processes of an engine that spans machines read from their environment."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_CLUSTER_VARIABLE = "FLOTILLA_ENGINE_CLUSTER"
_SITE_VARIABLE = "FLOTILLA_ENGINE_SITE"
# Names the replica to its workers.
REPLICA_VARIABLE = "FLOTILLA_ENGINE_REPLICA"


def worker_logs(replica: int, machine: int | str, worker: int | str = "*") -> str:
    """Return the name of a worker's log on its machine, or a pattern of several."""
    return f"rollout-{replica}-node-{machine}-worker-{worker}.log"


@dataclass(frozen=True, slots=True)
class EngineCluster:
    """The cluster at `address`, for the core of a replica's engine: machines with `each`
    workers."""

    address: str
    machines: int
    each: int
    replica: int

    @property
    def workers(self) -> int:
        """All workers of the engine."""
        return self.machines * self.each

    @staticmethod
    def of_this_process() -> "EngineCluster":
        """Return what `to_environment` has told. Raises KeyError elsewhere."""
        return EngineCluster(**json.loads(os.environ[_CLUSTER_VARIABLE]))

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables of the core's environment."""
        return {_CLUSTER_VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class MachineSite:
    """One machine, for the workers there: the folder in which it has the model, the host of the
    engine's first machine, and how many workers each machine has."""

    model: str
    head: str
    each: int

    @staticmethod
    def of_this_process() -> "MachineSite":
        """Return what `to_environment` has told. Raises KeyError elsewhere."""
        return MachineSite(**json.loads(os.environ[_SITE_VARIABLE]))

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables of the machine's Ray node."""
        return {_SITE_VARIABLE: json.dumps(asdict(self))}
