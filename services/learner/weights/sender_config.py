"""Configuration of the sender of weights, importable without the sender's tensors."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from services.common.weight_transfer import TransferSettings

# A line of stdin without a publication: a running sender answers it.
PING = b"\n"


@dataclass(frozen=True, slots=True)
class WeightSenderConfig:
    """Configuration of the sender: its meeting point for engines, and its timeouts."""

    run_id: str
    host: str = "127.0.0.1"
    port: int = 0
    # Address for others, if different.
    advertise: str | None = None
    # Weights go over `ipc` to engines on the sender's own devices.
    shares_devices: bool = False
    settings: TransferSettings = field(default_factory=TransferSettings)

    @property
    def reached_at(self) -> str:
        """Host at which engines reach the sender."""
        return self.advertise or self.host

    def to_line(self) -> bytes:
        """Encode as a line of stdin."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "WeightSenderConfig":
        """Decode the result of `to_line`."""
        values: dict[str, Any] = json.loads(line)
        values["settings"] = TransferSettings(**values["settings"])
        return WeightSenderConfig(**values)
