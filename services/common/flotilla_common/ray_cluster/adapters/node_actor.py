"""An actor on a further machine, which exchanges marks with the machine's program."""

import asyncio
import socket

from flotilla_common.ray_cluster.node_folder import NodeFolder

_LOOK_S = 0.25
_TAIL_BYTES = 1024


class NodeActor:
    """The service's handle on a machine. Ray ends it with the service or with the node."""

    def __init__(self) -> None:
        self._node = NodeFolder.of_this_node()

    async def join_service(self) -> str:
        """Mark the machine as used; return its host name for messages."""
        self._node.joined.touch()
        return socket.gethostname()

    async def wait_until_leaving(self) -> None:
        """Wait until the machine has to leave."""
        while True:
            if self._node.leaving.exists():
                return
            await asyncio.sleep(_LOOK_S)

    async def stay(self) -> None:
        """Run for ever: the call fails when the machine is lost."""
        await asyncio.Event().wait()

    async def dismiss_node(self) -> None:
        """Notify the machine's program that the service has ended in order."""
        self._node.over.touch()

    async def read_tails(self, pattern: str) -> str:
        """Return the ends of the logs whose names match `pattern`."""
        tails: list[str] = []
        for log in sorted(self._node.logs.glob(pattern)):
            text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
            tails.append(f"end of {log}:\n{text}")
        return "\n".join(tails)
