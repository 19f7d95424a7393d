"""A Tinker service as the engine: it samples with saved weights, which publications name."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import tinker
from numpy.typing import NDArray

from flotilla_common.adapters.tinker_service import Trouble, classify, describe, find_silence
from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import TinkerConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.sampler_reference import ReferenceFileError, read_reference
from flotilla_rollout.adapters.tinker_session import TinkerSession
from flotilla_rollout.adapters.vllm_answers import check_completion
from flotilla_rollout.adapters.vllm_sampling import derive_seed
from flotilla_rollout.ports import EngineDead, EngineError, RequestAborted, TransportFailed
from flotilla_rollout.types import (
    OUT_OF_TIME,
    Completion,
    MemoryPeak,
    PolicySpan,
    Publication,
    Sampling,
)
from flotilla_rollout.work.service_use import ServiceUse

T = TypeVar("T")
LOOK_S = 1.0
# A wait is logged after the first, and then every second of these.
SAY_FIRST_S, SAY_S = 5.0, 60.0
# Pause before a call that the client has given up is repeated.
PAUSE_S = 5.0
# Samplers of one request that the service has lost; each was opened anew.
MOST_LOSSES = 3
# Services may keep a seed in 32 bits, as SkyRL's do.
SEEDS = 2**31
_WRONG_KEY = (401, 403)
_NAME = "the Tinker service"

log = get_logger(__name__)


@dataclass(slots=True)
class _Served:
    """Weights that answer requests; the sampler may be lost and opened again."""

    policy: PolicyId
    address: str
    session: TinkerSession
    sampler: tinker.SamplingClient


class TinkerEngine:
    """The Engine port over a Tinker service.

    A request is answered by the weights that were served when it began, to its end. While the
    service answers nobody, requests wait within their own time, and the engine lives on for
    `policy.tinker.patience_s`. Requests have no pictures: `policy.vision` is refused."""

    def __init__(
        self,
        config: TinkerConfig,
        run_id: str,
        stop_token_ids: Sequence[int],
        use: ServiceUse,
        *,
        seeded: bool,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._stop = list(stop_token_ids)
        self._use = use
        self._seeded = seeded
        self._sessions: list[TinkerSession] = []
        self._served: _Served | None = None
        self._unopened = "no session could be opened yet"
        self._opening = asyncio.Lock()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._looking = asyncio.create_task(self._keep_looking())

    @classmethod
    async def start_engine(
        cls,
        config: TinkerConfig,
        run_id: str,
        stop_token_ids: Sequence[int],
        use: ServiceUse,
        *,
        seeded: bool = True,
    ) -> Self:
        """Open a session, however long the service is away. Raises ConfigError if it refuses, and
        EngineDead."""
        engine = cls(config, run_id, stop_token_ids, use, seeded=seeded)
        try:
            await engine._open_session()
        except BaseException as error:
            await engine.close()
            if not isinstance(error, Exception) or isinstance(error, EngineDead | ConfigError):
                raise
            raise ConfigError(f"no session with {_NAME}: {describe(error)}") from error
        return engine

    @property
    def policy(self) -> PolicyId | None:
        return self._served.policy if self._served else None

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        """Sample one policy turn. A request whose time is over is cancelled at the service, which
        gives out no parts of answers: its turn has no tokens. Raises RequestAborted if the service
        answers nobody then."""
        params = tinker.SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            seed=self._seed_of(sampling, len(token_ids)),
            stop=self._stop,
        )
        return await self._sample(token_ids, params, timeout_s)

    def _seed_of(self, sampling: Sampling, length: int) -> int | None:
        seed = derive_seed(sampling, length) if self._seeded else None
        return seed and seed % SEEDS

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        prompt = tinker.ModelInput.from_ints(token_ids.tolist())
        found = await self._ask(self._find_served(), lambda one: one.compute_logprobs(prompt))
        # One token is sampled too, and nothing comes before the first.
        self._use.note_answer(len(token_ids), 1)
        # Of the first, most services say that it has none; SkyRL's say nothing.
        logprobs = np.array(found[len(found) == len(token_ids) :], np.float32)
        if len(logprobs) != len(token_ids) - 1 or not np.isfinite(logprobs).all():
            raise EngineError(f"{_NAME} left out logprobs of a prompt")
        return np.minimum(logprobs, np.float32(0.0))

    async def burn_in(
        self,
        token_ids: NDArray[np.int32],
        max_tokens: int,
        timeout_s: float,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        """Sample like a turn, which may end before `max_tokens`: there is no memory to test. Its
        time does not run while the service answers nobody."""
        seed = 0 if self._seeded else None
        params = tinker.SamplingParams(max_tokens=max_tokens, seed=seed, stop=self._stop)
        while True:
            with suppress(RequestAborted):
                answer = await self._sample(token_ids, params, timeout_s)
                if not (answer.timed_out and answer.waited_s):
                    return answer

    async def load_weights(self, publication: Publication, path: Path) -> None:
        """Let new requests be answered by the weights whose address a publication holds, however
        long the service is away."""
        try:
            address = read_reference(path)
        except ReferenceFileError as error:
            raise ConfigError(str(error)) from error
        try:
            async with self._opening:
                session = await self._find_session()
            sampler = await self._keep_trying(lambda: session.open_sampler(address))
        except Exception as error:
            self._raise_if_dead(error)
            raise TransportFailed(f"{address}: {describe(error)}") from error
        self._served = _Served(publication.policy, address, session, sampler)

    async def receive_weights(self, publication: Publication) -> None:
        raise TransportFailed(f"{_NAME} receives no weights from a learner")

    async def measure_memory(self) -> Sequence[MemoryPeak]:
        return ()

    async def identify_devices(self) -> Sequence[str]:
        return ()

    async def wait_until_dead(self) -> str:
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """Finish the sessions, if the service answers soon."""
        await cancel_tasks((self._looking,))
        await asyncio.gather(*(session.close() for session in self._sessions))

    async def _sample(
        self, token_ids: NDArray[np.int32], params: tinker.SamplingParams, timeout_s: float
    ) -> Completion:
        served, waited_before_s = self._find_served(), self._look()
        prompt = tinker.ModelInput.from_ints(token_ids.tolist())
        try:
            async with asyncio.timeout(None if timeout_s == inf else timeout_s):
                answer = await self._ask(served, lambda one: one.sample(prompt, 1, params))
        except TimeoutError:
            # It may have fallen silent just now.
            await served.session.has_ended()
            waited_s = self._look() - waited_before_s
            if reason := self._use.reason:
                raise RequestAborted(f"time ran out while {_NAME} was away: {reason}") from None
            return replace(OUT_OF_TIME, waited_s=waited_s)
        self._use.note_answer(len(token_ids), sum(len(each.tokens) for each in answer.sequences))
        waited_s = self._look() - waited_before_s
        return replace(self._make_completion(answer, served.policy), waited_s=waited_s)

    def _make_completion(self, answer: tinker.SampleResponse, policy: PolicyId) -> Completion:
        if len(answer.sequences) != 1:
            raise EngineError(f"{_NAME} answered with {len(answer.sequences)} samples")
        [sequence] = answer.sequences
        ids = np.array(sequence.tokens, np.int32)
        cut = sequence.stop_reason == "length"
        if not cut and (not len(ids) or ids[-1] not in self._stop):
            raise EngineError(f"{_NAME} left out the token that ended a turn")
        logprobs = np.minimum(np.array(sequence.logprobs or (), np.float32), np.float32(0.0))
        spans = (PolicySpan(policy, len(ids)),)
        return check_completion(Completion(ids, logprobs, spans, cut), _NAME)

    def _find_served(self) -> _Served:
        if self._death.done():
            raise EngineDead(self._death.result())
        if self._served is None:
            raise EngineError("no policy is loaded")
        return self._served

    async def _ask(
        self, served: _Served, call: Callable[[tinker.SamplingClient], Awaitable[T]]
    ) -> T:
        """Have a request answered; a sampler that is lost is opened again, and asked again. Raises
        EngineError."""
        for _ in range(MOST_LOSSES):
            session, sampler = served.session, served.sampler
            try:
                answer = await self._keep_trying(lambda one=sampler: call(one))
            except Exception as error:
                self._raise_if_dead(error)
                failed = isinstance(error, tinker.RequestFailedError)
                gone = classify(error) is Trouble.GONE or (failed and await session.has_ended())
                if not gone:
                    raise EngineError(describe(error)) from error
                log.warning("sampler lost", address=served.address, reason=describe(error))
            else:
                session.note_answer()
                return answer
            await self._open_again(served, sampler)
        raise EngineError(f"{_NAME} lost the samplers of a request {MOST_LOSSES} times")

    async def _open_again(self, served: _Served, lost: tinker.SamplingClient) -> None:
        """Open the lost sampler of some weights again, once for all of its requests."""
        async with self._opening:
            if served.sampler is not lost:
                return
            try:
                served.session = await self._find_session()
                served.sampler = await self._keep_trying(
                    lambda: served.session.open_sampler(served.address)
                )
            except Exception as error:
                self._raise_if_dead(error)
                raise EngineError(f"{served.address}: {describe(error)}") from error

    async def _find_session(self) -> TinkerSession:
        """Return an open session. Raises EngineDead, and the client's errors."""
        newest = self._sessions[-1]
        return await self._open_session() if await newest.has_ended() else newest

    async def _open_session(self) -> TinkerSession:
        """Open a session, from now on the newest. Raises EngineDead, and the client's errors."""
        session = await self._keep_trying(
            lambda: TinkerSession.open_session(self._config, self._run_id)
        )
        self._sessions.append(session)
        return session

    async def _keep_trying(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call that the client has given up until the service answers it. Raises
        EngineDead, and the client's errors."""
        while not self._death.done():
            try:
                return await call()
            except Exception as error:
                if classify(error) is not Trouble.WAIT:
                    raise
                log.warning("the Tinker client gave up a call", reason=describe(error))
            await asyncio.sleep(PAUSE_S)
        raise EngineDead(self._death.result())

    def _raise_if_dead(self, error: Exception) -> None:
        """Raise EngineDead if nothing can be had of the service after this error."""
        if isinstance(error, EngineDead):
            raise error
        for cause in (error, error.__cause__):
            if cause is not None and getattr(cause, "status_code", None) in _WRONG_KEY:
                self._die(describe(cause))
                raise EngineDead(self._death.result()) from error

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)

    async def _keep_looking(self) -> None:
        """Note what the service is waited for, say it once a minute, and end the wait some day."""
        said = -inf
        while True:
            self._look()
            now, use = loop_time(), self._use
            waiting_s = use.waiting_s(now)
            if waiting_s >= SAY_FIRST_S and now - said >= SAY_S:
                said = now
                if not self._sessions and (silence := await find_silence(self._config)):
                    self._unopened = f"no session could be opened yet: {silence}"
                    self._look()
                since = round(waiting_s)
                log.warning("waiting for the Tinker service", since_s=since, reason=use.reason)
            if (most := self._config.patience_s) <= waiting_s:
                self._die(
                    f"{_NAME} has answered nobody for {most:g} s (policy.tinker.patience_s):"
                    f" {use.reason}"
                )
            await asyncio.sleep(LOOK_S)

    def _look(self) -> float:
        """Note what the service is waited for; return the seconds of all waits so far."""
        newest, now = self._sessions[-1] if self._sessions else None, loop_time()
        reason = newest.trouble if newest else self._unopened
        self._use.note_state(reason, now)
        return self._use.waited_s(now)
