"""Configuration of the sender of weights, importable without the sender's tensors."""

from dataclasses import dataclass, field

from flotilla_common.weights.weight_transfer import TransferSettings

# A message without a publication: a running sender answers it.
PING = {"ping": True}


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
