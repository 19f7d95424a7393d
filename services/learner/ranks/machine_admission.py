"""Admission rules of a learner's further machines, pure."""

import hashlib
from dataclasses import dataclass

from services.common.config import canonical_json
from services.common.spec import PolicyConfig
from services.learner.config.learner import LearnerConfig

# Where the ranks are is not what they compute.
_PLACEMENT_KEYS = {"processes", "nodes", "network", "join_s"}


class WrongMachineError(Exception):
    """The machine was told of another run than the learner; the message names the difference."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of a learner: `number` of `machines`, with so many `ranks`; 0 is the first."""

    run_id: str
    number: int
    machines: int
    ranks: int
    spec_digest: bytes
    hostname: str = ""

    def check_joining(self, other: "Machine") -> None:
        """Raise WrongMachineError where `other` cannot be of the same learner."""
        if other.run_id != self.run_id:
            problem = f"is of run {other.run_id}, the learner of {self.run_id}"
        elif other.machines != self.machines:
            problem = _describe_difference("nodes", other.machines, self.machines)
        elif other.ranks != self.ranks:
            problem = _describe_difference("processes", other.ranks, self.ranks)
        elif not 0 < other.number < self.machines:
            problem = f"is none of the numbers 1 to {self.machines - 1}"
        elif other.spec_digest != self.spec_digest:
            problem = (
                "has another [policy], or another algorithm, optimizer, lora or rank in [learner];"
                " start it with the learner's spec and overrides"
            )
        else:
            return
        raise WrongMachineError(f"machine {other.number} ({other.hostname}) {problem}")


def machine_from_config(
    run_id: str, number: int, policy: PolicyConfig, config: LearnerConfig, hostname: str
) -> Machine:
    """Describe a machine as its own spec has it."""
    rank = config.rank
    trained = {
        "policy": policy.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "rank": rank.model_dump(mode="json", exclude=_PLACEMENT_KEYS),
        "lora": None if config.lora is None else config.lora.model_dump(mode="json"),
        "steps": config.steps,
    }
    digest = hashlib.sha256(canonical_json(trained).encode()).digest()
    return Machine(run_id, number, rank.nodes, rank.processes, digest, hostname)


def _describe_difference(key: str, given: int, wanted: int) -> str:
    return f"has learner.rank.{key} = {given}, the learner {wanted}; start both with one spec"
