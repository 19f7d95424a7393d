"""Transfers of weights into the live engine, which the rollout drives by vLLM's own calls."""

import uuid
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.ports import TransportFailed, WeightsTorn
from flotilla_rollout.types import Publication

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = get_logger(__name__)


class WeightTransfers:
    """The group of one engine with the learner's sender, opened on first use and again after each
    failure."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        # The sender's address and the backend; None while there is no group.
        self._opened: tuple[str, str] | None = None

    async def open_group(self, publication: Publication) -> None:
        """Join the group of the sender that `publication` names. Raises TransportFailed."""
        address, backend = wanted = (publication.location, publication.transport)
        if self._opened == wanted:
            return
        self._opened = None
        if why := await self._try_to_join(address, backend):
            raise TransportFailed(f"no group with {address}: {why}")
        self._opened = wanted
        log.info("joined the weight sender", address=address)

    async def _try_to_join(self, address: str, backend: str) -> str:
        """Return why the workers could not join the sender, or ""."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"address": address, "group": uuid.uuid4().hex, "backend": backend}
        request = WeightTransferInitRequest(info)
        try:
            return await self._run(self._llm.init_weight_transfer_engine(request))
        # vLLM may raise any class, and the engine's death is noticed elsewhere.
        except Exception as error:  # noqa: BLE001
            return str(error)

    async def receive_weights(self, publication: Publication) -> None:
        """Receive into the paused engine through its open group.

        Raises TransportFailed if nothing has changed, and WeightsTorn."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        request = WeightTransferUpdateRequest(_update_info(publication))
        why = await self._run(self._llm.update_weights(request))
        await self._llm.finish_weight_update()
        if not why:
            return
        self._opened = None
        torn = any(torn for _, torn in await self._judge())
        await self._llm.shutdown_weight_transfer_engine()
        kind = WeightsTorn if torn else TransportFailed
        raise kind(f"{publication.policy.label} was not received: {why}")

    async def _run(self, call: Awaitable[object]) -> str:
        """Make a call in all workers; return why the first of them failed, or ""."""
        await call
        return next((why for why, _ in await self._judge() if why), "")

    async def _judge(self) -> Sequence[tuple[str, bool]]:
        return await self._llm.collective_rpc("judge_flotilla_transfer")


def _update_info(publication: Publication) -> dict[str, object]:
    policy = publication.policy
    rows = [
        (entry.name, entry.dtype, list(entry.shape), entry.offset_bytes, entry.checksum)
        for entry in publication.manifest
    ]
    return {
        "run_epoch": policy.run_epoch,
        "version": policy.version,
        "fingerprint": policy.fingerprint.hex(),
        "total_bytes": publication.total_bytes,
        "rows": rows,
    }
