"""Updates that keep the engine on the newest policy. `adapters/vllm_weights.py` loads the weights
into vLLM."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.concurrency import run_until_first
from flotilla_common.telemetry import metrics
from flotilla_common.telemetry.log import bind_process, get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_common.weights.weight_transfer import BACKENDS
from flotilla_rollout.ports import (
    Engine,
    EngineDead,
    EngineError,
    PolicyFeed,
    TransportFailed,
    WeightsTorn,
)
from flotilla_rollout.types import Completion, Publication, UpdateOutcome
from flotilla_rollout.work.weight_staging import FingerprintMismatch, KeptWeights, stage_weights

NO_LOGPROBS = np.zeros(0, np.float32)
ATTACH_PAUSE_S = 0.5

_update_seconds = metrics.seconds_histogram(
    "flotilla_policy_update_seconds", "From the announcement of weights to serving them"
)

log = get_logger(__name__)


class WeightUpdater:
    """Loop that attaches, loads announced weights, and reports.

    It loads one publication at a time, and then only the newest of those announced meanwhile. Until
    new weights are verified the engine keeps the old ones."""

    def __init__(
        self,
        feed: PolicyFeed,
        engine: Engine,
        staged: Path,
        watchdog: Watchdog | None = None,
        *,
        patience_s: float = 0.0,
    ) -> None:
        """Build the loop; the engine may take `patience_s` for a canary, if that is longer than the
        publication's timeout."""
        self._watchdog = watchdog or Watchdog()
        self._feed = feed
        self._engine = engine
        self._patience_s = patience_s
        self._staged = staged
        self._kept = KeptWeights(staged.with_name(f"{staged.name}.kept"))
        self._newest: Publication | None = None
        self._announced = asyncio.Event()
        # Set unless the engine serves weights whose canary has not been judged yet.
        self._judged = asyncio.Event()
        self._judged.set()
        self._first_judged = asyncio.Event()
        self.updating = False
        self.updates = 0
        self.last_update_s = 0.0

    async def keep_updating(self) -> None:
        """Follow the policy for ever. Raises EngineDead if the engine can no longer serve."""
        # A killed predecessor could not remove its files, each as large as the model.
        self._remove_files()
        try:
            await run_until_first(self._read_publications(), self._apply_newest())
        finally:
            self._remove_files()

    def _remove_files(self) -> None:
        self._staged.unlink(missing_ok=True)
        self._kept.forget()

    async def wait_until_judged(self) -> None:
        """Wait until the learner has judged the canary of the served weights."""
        await self._judged.wait()

    async def wait_for_first_weights(self) -> None:
        """Wait until the first weights are served and the learner has judged their canary."""
        await self._first_judged.wait()

    async def _read_publications(self) -> None:
        while True:
            async for publication in self._feed.stream_publications(self._engine.policy):
                held = self._engine.policy
                if held is not None and publication.policy < held:
                    # Announced by a learner that has been replaced.
                    log.warning("older policy ignored", policy=publication.policy.label)
                    continue
                self._newest = publication
                self._announced.set()
            await asyncio.sleep(ATTACH_PAUSE_S)

    async def _apply_newest(self) -> None:
        while True:
            await self._announced.wait()
            self._announced.clear()
            publication, self._newest = self._newest, None
            if publication is not None:
                with self._watchdog.stage("update policy"):
                    await self._apply_publication(publication)

    async def _apply_publication(self, publication: Publication) -> None:
        began = time.monotonic()
        try:
            outcome, detail = await self._replace_weights(publication)
            if outcome is not UpdateOutcome.APPLIED:
                log.warning("policy not loaded", policy=publication.policy.label, detail=detail)
                await self._feed.report_update(publication, outcome, NO_LOGPROBS, detail)
                return
            canary = await self._score_canary(publication)
        except EngineDead as error:
            failed = UpdateOutcome.ENGINE_FAILED
            await self._feed.report_update(publication, failed, NO_LOGPROBS, str(error))
            raise
        probed = await self._sample_probes(publication)
        self.updates += 1
        self.last_update_s = time.monotonic() - began
        _update_seconds()(self.last_update_s)
        bind_process(step=publication.policy.version)
        if not await self._feed.report_update(publication, outcome, canary, "", probed):
            raise EngineDead(f"the canary of policy {publication.policy.label} disagrees")
        self._judged.set()
        self._first_judged.set()
        log.info("policy loaded", policy=publication.policy.label, seconds=self.last_update_s)

    async def _replace_weights(self, publication: Publication) -> tuple[UpdateOutcome, str]:
        """Load the weights, and keep their file for a later delta."""
        self.updating = True
        try:
            outcome, detail = await self._load_weights(publication)
            if outcome is UpdateOutcome.APPLIED:
                self._kept.replace_by(publication, self._staged)
        finally:
            self.updating = False
            self._staged.unlink(missing_ok=True)
        return outcome, detail

    async def _load_weights(self, publication: Publication) -> tuple[UpdateOutcome, str]:
        """Make the engine receive sent weights, or load staged and verified ones. Weights already
        held are only scored, unless they are not trusted. Raises EngineDead."""
        held = self._engine.policy
        same = held == publication.policy and not publication.reload
        if held and same and held.fingerprint == publication.policy.fingerprint:
            return UpdateOutcome.APPLIED, ""
        judged = self._judged.is_set()
        try:
            if publication.transport in BACKENDS:
                self._judged.clear()
                await self._engine.receive_weights(publication)
            else:
                await stage_weights(publication, self._feed, self._staged, self._kept)
                self._judged.clear()
                await self._engine.load_weights(publication, self._staged)
        except TransportFailed as error:
            # The old ones are still served.
            if judged:
                self._judged.set()
            return UpdateOutcome.TRANSPORT_FAILED, str(error)
        except FingerprintMismatch as error:
            return UpdateOutcome.FINGERPRINT_MISMATCH, str(error)
        except WeightsTorn as error:
            return UpdateOutcome.ENGINE_FAILED, str(error)
        return UpdateOutcome.APPLIED, ""

    async def _score_canary(self, publication: Publication) -> NDArray[np.float32]:
        """Return the canary's logprobs.

        Weights that cannot be checked must not be served: raises EngineDead, also if the engine
        does not answer within the publication's timeout."""
        limit_s = max(publication.timeout_s, self._patience_s)
        try:
            async with asyncio.timeout(limit_s):
                return await self._engine.compute_logprobs(
                    publication.canary_token_ids, publication.canary_pictures
                )
        except (EngineError, TimeoutError) as error:
            label = publication.policy.label
            reason = str(error) or f"no answer after {limit_s:g} s (learner.publish_timeout_s)"
            raise EngineDead(
                f"the canary of policy {label} could not be scored: {reason}"
            ) from error

    async def _sample_probes(self, publication: Publication) -> Sequence[Completion]:
        """Sample the learner's probes; return nothing if the engine cannot."""
        samples = [
            self._engine.generate(probe.token_ids, probe.sampling, probe.max_tokens)
            for probe in publication.probes
        ]
        try:
            return await asyncio.gather(*samples)
        except EngineDead:
            raise
        except EngineError as error:
            # The samples for training are judged anyway.
            log.warning("probes not sampled", policy=publication.policy.label, reason=str(error))
            return ()
