"""One rank on a further machine, as the actor that Ray places there."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from services.common.adapters.model_hub import stage_model
from services.learner.ports import RankError
from services.learner.ranks.cluster_plan import ActorPlan
from services.learner.ranks.node_folder import NodeFolder
from services.learner.ranks.rank_process import RankProcess

_LOOK_S = 0.25


class RankActor:
    """A rank in a child process of the actor's: neither's libraries meet the other's."""

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._node = NodeFolder.of_this_node()
        self._rank: RankProcess | None = None

    async def start_rank(self) -> str:
        """Fetch the model, start the rank, and return the machine's name for messages."""
        plan = self._plan
        self._node.joined.touch()
        await asyncio.to_thread(stage_model, plan.model, plan.revision)
        log = self._node.path / "logs" / f"learner-node-{plan.machine}-rank-{plan.slot}.log"
        name = f"training rank {plan.index}"
        self._rank = await RankProcess.spawn_rank(name, log, plan.environment)
        return socket.gethostname()

    async def run_command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rank's `result`, or its `error` and whether it has `ended`."""
        assert self._rank is not None
        try:
            return {"result": await self._rank.send_command(command, arguments)}
        except RankError as error:
            return {"error": str(error), "ended": self._rank.has_ended}

    async def wait_until_leaving(self) -> None:
        """Wait until the machine has to go."""
        while True:
            if self._node.leaving.exists():
                return
            await asyncio.sleep(_LOOK_S)

    async def dismiss_node(self) -> None:
        """Tell the machine's program that the learner has ended in order."""
        self._node.over.touch()

    async def close_rank(self) -> None:
        """End the rank in order."""
        if self._rank is not None:
            await self._rank.close()
