"""Rank on another machine, as the actor that Ray places there."""

import asyncio
from collections.abc import Mapping
from typing import Any

from flotilla_common.adapters.model_hub import stage_model
from flotilla_common.ray_cluster.adapters.node_actor import NodeActor
from flotilla_learner.ports import RankError
from flotilla_learner.ranks.cluster_plan import ActorPlan
from flotilla_learner.ranks.rank_process import RankProcess


class RankActor(NodeActor):
    """A rank in a child process of the actor, so that their libraries never meet."""

    def __init__(self, plan: ActorPlan) -> None:
        super().__init__()
        self._plan = plan
        self._rank: RankProcess | None = None

    async def start_rank(self) -> str:
        """Fetch the model, start the rank, and return the machine's name for messages."""
        plan = self._plan
        host = await self.join_service()
        await asyncio.to_thread(stage_model, plan.model, plan.revision)
        log = self._node.logs / f"learner-node-{plan.machine}-rank-{plan.slot}.log"
        name = f"training rank {plan.index}"
        self._rank = await RankProcess.spawn_rank(name, log, plan.environment)
        return host

    async def run_command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rank's `result`, or its `error` and whether it has `ended`."""
        assert self._rank is not None
        try:
            return {"result": await self._rank.send_command(command, arguments)}
        except RankError as error:
            return {"error": str(error), "ended": self._rank.has_ended}

    async def close_rank(self) -> None:
        """Shut the rank down cleanly."""
        if self._rank is not None:
            await self._rank.close()
