"""A burn-in: a test of the engine at the greatest lengths of an attempt, before the first lease."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.made_pictures import plain_picture
from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.picture_files import MOST_PIXELS
from flotilla_common.images.placeholders import expand_pictures
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.ports import Engine, EngineDead, EngineError
from flotilla_rollout.types import Completion, MemoryPeak
from flotilla_rollout.work.options import BurnInHints, BurnInLengths

GIB = 2**30

log = get_logger(__name__)


class BurnIn:
    """One prompt and one answer through the engine after its first weights.

    `settled` waits until their canary has been judged. Tokens of the burn-in belong to no attempt:
    no count and no trajectory includes them. With a `family` the prompt ends with the largest
    picture for which it has room. Without `lengths` it does nothing."""

    def __init__(
        self,
        engine: Engine,
        lengths: BurnInLengths | None,
        hints: BurnInHints,
        draw_prompt: Callable[[int], NDArray[np.int32]],
        settled: Callable[[], Awaitable[object]],
        family: VisionFamily | None = None,
    ) -> None:
        self._engine = engine
        self._lengths = lengths
        self._hints = hints
        self._draw_prompt = draw_prompt
        self._settled = settled
        self._family = family
        self.running = False
        self.over = lengths is None
        self.metrics: dict[str, float] = {}

    async def run_once(self) -> None:
        """Test the engine. Raises ConfigError, or EngineDead if a retry may help."""
        if self._lengths is None:
            return
        await self._settled()
        self.running = True
        began = time.monotonic()
        try:
            answer = await self._sample_answer(self._lengths)
            peaks = await self._engine.measure_memory()
        except EngineDead as error:
            raise self.explain_death(str(error)) from error
        except EngineError as error:
            raise ConfigError(f"{self._describe()} failed: {error}") from error
        finally:
            self.running = False
        self._check_answer(answer, self._lengths)
        self._report_pass(self._lengths, time.monotonic() - began, peaks)
        self.over = True

    def explain_death(self, reason: str) -> Exception:
        """Return the error for a dead engine.

        One that dies while the burn-in tests a run's first weights would die again."""
        policy = self._engine.policy
        if not self.running or (policy is not None and policy.version > 0):
            return EngineDead(reason)
        return ConfigError(f"{self._describe()} ended the engine: {reason}; {self._hints.memory}")

    async def _sample_answer(self, lengths: BurnInLengths) -> Completion:
        prompt, pictures = self._draw_prompt(lengths.prompt), list[ShownPicture]()
        if self._family is not None:
            prompt, pictures = await asyncio.to_thread(end_with_picture, prompt, self._family)
        return await self._engine.burn_in(prompt, lengths.answer, lengths.timeout_s, pictures)

    def _check_answer(self, answer: Completion, lengths: BurnInLengths) -> None:
        sampled = len(answer.token_ids)
        if sampled < lengths.answer:
            raise ConfigError(
                f"{self._describe()} is not over after {lengths.timeout_s:g} s, with {sampled}"
                f" tokens sampled; {self._hints.time}"
            )

    def _report_pass(
        self, lengths: BurnInLengths, seconds: float, peaks: Sequence[MemoryPeak]
    ) -> None:
        engine = sum(peak.host for peak in peaks)
        device = max((peak.device for peak in peaks), default=0)
        own = peak_memory_bytes()
        self.metrics = {
            "burn_in_seconds": seconds,
            "peak_memory_bytes": float(own),
            "engine_peak_memory_bytes": float(engine),
            "engine_peak_gpu_bytes": float(device),
        }
        log.info(
            "burn-in passed",
            prompt_tokens=lengths.prompt,
            answer_tokens=lengths.answer,
            seconds=round(seconds, 3),
            peak_gib=round(own / GIB, 2),
            engine_peak_gib=[round(peak.host / GIB, 2) for peak in peaks],
            gpu_peak_gib=[round(peak.device / GIB, 2) for peak in peaks if peak.device_total],
            gpu_gib=[round(peak.device_total / GIB, 2) for peak in peaks if peak.device_total],
        )

    def _describe(self) -> str:
        lengths = self._lengths or BurnInLengths(0, 0, 0.0)
        shown = "" if self._family is None else " with a picture"
        return (
            f"the burn-in (a prompt of {lengths.prompt} tokens{shown} and an answer of"
            f" {lengths.answer})"
        )


def end_with_picture(
    ids: NDArray[np.int32], family: VisionFamily
) -> tuple[NDArray[np.int32], list[ShownPicture]]:
    """Return a prompt of the same length whose last tokens are a square picture, the largest that
    fits and that the family does not scale down; as it is if there is no room for any."""
    unit = family.patch * family.merge
    # Two marks are around it, and a token comes before them.
    room = len(ids) - 3
    units = math.isqrt(max(min(room, min(family.max_pixels, MOST_PIXELS) // unit**2), 1))
    side = units * unit
    count = family.count(family.grid(side, side))
    if count > room:
        return ids, []
    kept = ids[: room - count + 1].tolist()
    return expand_pictures([*kept, *family.picture_ids], [plain_picture(side, side)], family)
