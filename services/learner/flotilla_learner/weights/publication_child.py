"""Child processes beside the learner that distribute publications: WeightService, and the sender of
transfers into live engines."""

from pathlib import Path
from typing import Any

from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.line_channel import ChildLostError, LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_common.process.runtime import Runtime
from flotilla_common.rpc.network_addresses import (
    advertised_address,
    join_host_port,
    split_host_port,
)
from flotilla_common.weights.weight_transfer import TransferSettings
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.types import Publication
from flotilla_learner.weights.sender_config import PING, WeightSenderConfig
from flotilla_learner.weights.weight_server import WeightServerConfig
from flotilla_learner.weights.weight_snapshots import WeightSnapshot

_START_SECONDS = 30.0
_ANSWER_SECONDS = 10.0
_CLOSE_SECONDS = 5.0


def server_config_of(runtime: Runtime[LearnerConfig]) -> WeightServerConfig:
    """Configure a server beside the learner: on the same host, for the same callers."""
    config, (host, outer) = runtime.config.weights, _hosts_of(runtime)
    return WeightServerConfig(
        run_id=runtime.run_id,
        token=runtime.token,
        tls=runtime.tls.to_text() if runtime.tls else None,
        listen=join_host_port(host, config.port),
        advertise=config.advertise or outer,
        delta=config.delta == "auto",
    )


def sender_config_of(runtime: Runtime[LearnerConfig]) -> WeightSenderConfig | None:
    """Configure a sender beside the learner; None if no engine is sent weights."""
    config, (host, outer) = runtime.config.weights, _hosts_of(runtime)
    if config.transfer == "off" or config.network == "public":
        return None
    settings = TransferSettings(stall_s=config.transfer_stall_s)
    shares_devices = config.transfer == "ipc"
    return WeightSenderConfig(
        runtime.run_id, host, config.transfer_port, outer, shares_devices, settings
    )


def _hosts_of(runtime: Runtime[LearnerConfig]) -> tuple[str, str | None]:
    """Return the host that the learner listens on, and the one that others reach, if different."""
    host, _ = split_host_port(runtime.listen, "listen")
    outer = runtime.advertise
    # Without its port, which is the learner's own.
    if outer is not None:
        outer, _ = split_host_port(advertised_address(host, 0, outer), "advertised")
    return host, outer


class PublicationChild:
    """A process that receives announcements of publications, and serves them from shared memory.

    `module` is its main module, which answers each line with one; it logs to `log_path`."""

    def __init__(self, module: str, log_path: Path) -> None:
        self._module = module
        self._log_path = log_path
        self._child: LineChannel | None = None
        # Identities of devices whose memory it shares with engines.
        self.devices: frozenset[str] = frozenset()

    async def start_process(self, config: WeightServerConfig | WeightSenderConfig) -> str:
        """Start the process with its configuration and return its address. Raises
        ChildLostError."""
        command = python_command("-m", self._module)
        self._child = await LineChannel.start_child(self._name, command, self._log_path)
        # Not by its environment, which other processes can read.
        answer = await self._child.ask(config, _START_SECONDS)
        self.devices = frozenset(answer.get("devices", ()))
        return answer["address"]

    async def serve_publication(self, publication: Publication, policy_id: PolicyId) -> None:
        """Have `publication` served as `policy_id`; on return it can be fetched. Raises
        ChildLostError."""
        snapshot = WeightSnapshot(
            policy_id.run_epoch,
            policy_id.version,
            publication.fingerprint,
            str(publication.path),
            publication.total_bytes,
        )
        await self._ask(snapshot)

    async def check_answers(self) -> None:
        """Have the process answer a line without a publication. Raises ChildLostError."""
        await self._ask(PING)

    async def close(self) -> None:
        """End the process. May be called again, and in any state."""
        child, self._child = self._child, None
        if child is not None:
            await child.close(_CLOSE_SECONDS)

    @property
    def _name(self) -> str:
        return f"the {self._module.rpartition('.')[2].replace('_', ' ')}"

    async def _ask(self, message: Any) -> None:
        if self._child is None:
            raise ChildLostError(f"{self._name} has not been started")
        await self._child.ask(message, _ANSWER_SECONDS)
