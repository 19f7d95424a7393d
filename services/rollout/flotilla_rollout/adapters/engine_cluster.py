"""Environment variables of the processes of an engine that spans machines."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_CLUSTER_VARIABLE = "FLOTILLA_ENGINE_CLUSTER"
_SITE_VARIABLE = "FLOTILLA_ENGINE_SITE"
# Variable with the replica's number, for its workers.
REPLICA_VARIABLE = "FLOTILLA_ENGINE_REPLICA"


def worker_logs(replica: int, machine: int | str, worker: int | str = "*") -> str:
    """Return the name of a worker's log on its machine, or a pattern for several."""
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
        """Number of workers of the engine."""
        return self.machines * self.each

    @staticmethod
    def of_this_process() -> "EngineCluster":
        """Read the variables of `to_environment`. Raises KeyError if they are not set."""
        return EngineCluster(**json.loads(os.environ[_CLUSTER_VARIABLE]))

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables for the core's environment."""
        return {_CLUSTER_VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class MachineSite:
    """One machine's facts for its workers: the folder of the model, the host of the engine's first
    machine, and the number of workers per machine."""

    model: str
    head: str
    each: int

    @staticmethod
    def of_this_process() -> "MachineSite":
        """Read the variables of `to_environment`. Raises KeyError if they are not set."""
        return MachineSite(**json.loads(os.environ[_SITE_VARIABLE]))

    def to_environment(self) -> Mapping[str, str]:
        """Return the variables for the machine's Ray node."""
        return {_SITE_VARIABLE: json.dumps(asdict(self))}
