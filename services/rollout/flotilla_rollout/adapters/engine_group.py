"""Several engines of one replica behind one port, each with a copy of the model."""

import asyncio
from collections.abc import Sequence
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.concurrency import running_tasks, wait_for_any
from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_rollout.adapters.engine_slots import EngineSlots
from flotilla_rollout.ports import Engine, EngineDead, EngineError, TransportFailed, WeightsTorn
from flotilla_rollout.types import OUT_OF_TIME, Completion, MemoryPeak, Publication, Sampling

# Difference of logprobs that a different order of additions may cause.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


class EngineGroup:
    """The Engine port over independent engines; if one dies, all end."""

    def __init__(self, engines: Sequence[Engine], *, max_num_seqs: int, dtype: str) -> None:
        self._engines = engines
        self._slots = EngineSlots(len(engines), max_num_seqs)
        self._tolerance = TOLERANCE[dtype]

    @property
    def policy(self) -> PolicyId | None:
        """The oldest policy served: an update reaches one engine before another."""
        served = [engine.policy for engine in self._engines]
        known = [policy for policy in served if policy is not None]
        return min(known) if len(known) == len(served) else None

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        async with self._slots.take_slot(sampling.seed, ends) as index:
            if index is None:
                return OUT_OF_TIME
            left = ends - loop.time()
            return await self._engines[index].generate(
                token_ids, sampling, max_tokens, left, pictures
            )

    async def load_weights(self, publication: Publication, path: Path) -> None:
        await asyncio.gather(*(each.load_weights(publication, path) for each in self._engines))

    async def receive_weights(self, publication: Publication) -> None:
        """Have all engines receive them, each in its own group.

        Of several failures the worst is raised: a dead engine before torn weights."""
        results = await asyncio.gather(
            *(each.receive_weights(publication) for each in self._engines), return_exceptions=True
        )
        failed = [error for error in results if isinstance(error, BaseException)]
        if failed:
            raise max(failed, key=_severity)

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        """Score with every engine: a canary of one of them is no evidence about the others.

        Raises EngineError if they differ, which means that they hold different weights."""
        scored = await asyncio.gather(
            *(each.compute_logprobs(token_ids, pictures) for each in self._engines)
        )
        for index, logprobs in enumerate(scored):
            off = float(np.abs(logprobs - scored[0]).max(initial=0.0))
            if not off <= self._tolerance:
                raise EngineError(
                    f"engine {index} of this replica differs from engine 0 by {off:.2g} on the"
                    f" same tokens, above {self._tolerance:g}"
                )
        return scored[0]

    async def burn_in(
        self,
        token_ids: NDArray[np.int32],
        max_tokens: int,
        timeout_s: float,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        """Try all engines at once, because they share a machine; return the shortest answer."""
        tried = [each.burn_in(token_ids, max_tokens, timeout_s, pictures) for each in self._engines]
        return min(await asyncio.gather(*tried), key=lambda answer: len(answer.token_ids))

    async def measure_memory(self) -> Sequence[MemoryPeak]:
        peaks = await asyncio.gather(*(each.measure_memory() for each in self._engines))
        return [peak for peaks_of_engine in peaks for peak in peaks_of_engine]

    async def identify_devices(self) -> Sequence[str]:
        found = await asyncio.gather(*(each.identify_devices() for each in self._engines))
        return [device for devices_of_engine in found for device in devices_of_engine]

    async def wait_until_dead(self) -> str:
        async with running_tasks(*(each.wait_until_dead() for each in self._engines)) as waits:
            await wait_for_any(waits)
            dead = next(index for index, wait in enumerate(waits) if wait.done())
            return f"engine {dead} of this replica: {waits[dead].result()}"

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._engines))


def _severity(error: BaseException) -> int:
    """Rank an error of `receive_weights` by how much of an engine is lost."""
    kinds = (TransportFailed, WeightsTorn, EngineDead)
    return next((rank for rank, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
