"""Configuration of the sender of weights, which its parent knows without the sender's tensors."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from services.common.weight_transfer import TransferSettings

# A line of stdin that is no publication: the sender answers it, if it runs.
PING = b"\n"


@dataclass(frozen=True, slots=True)
class WeightSenderConfig:
    """Configuration of the sender: where engines meet it, and when it gives one up."""

    run_id: str
    host: str = "127.0.0.1"
    port: int = 0
    # Where others reach it, if not there.
    advertise: str | None = None
    # Weights go to engines on the sender's own devices there, over `ipc`.
    shares_devices: bool = False
    settings: TransferSettings = field(default_factory=TransferSettings)

    @property
    def reached_at(self) -> str:
        """The host at which engines reach the sender."""
        return self.advertise or self.host

    def to_line(self) -> bytes:
        """Encode as a line of stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "WeightSenderConfig":
        """Decode what `to_line` encoded."""
        values: dict[str, Any] = json.loads(line)
        values["settings"] = TransferSettings(**values["settings"])
        return WeightSenderConfig(**values)
