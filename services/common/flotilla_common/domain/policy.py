"""The name of one set of weights."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class PolicyId:
    """One set of weights; ordered by (run_epoch, version)."""

    run_epoch: int
    version: int
    fingerprint: bytes = field(default=b"", compare=False)

    @property
    def label(self) -> str:
        """Name of these weights in the engine, and the salt of its prefix cache."""
        return f"{self.run_epoch}:{self.version}"
