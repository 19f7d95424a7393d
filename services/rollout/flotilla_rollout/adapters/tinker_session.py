"""One open session with a Tinker service, and what its calls tell of the service."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import tinker
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.public_interfaces import sampling_client

from flotilla_common.adapters.tinker_service import Trouble, classify, describe, open_service
from flotilla_common.spec.spec import TinkerConfig

_BEAT_S = 3.0
_CLOSE_S = 5.0
_NOT_YET = 408
# The client asks again sooner than this; a call that nobody repeats tells nothing any more.
_FRESH_S = 60.0


class _Unanswered(NamedTuple):
    """Why, and when, a call was not answered for now; `reached` if the service said so itself."""

    when: float
    why: str
    reached: bool


class TinkerSession:
    """A session and the samplers that are opened in it.

    The client repeats calls by itself and tells nobody why: so each call is watched on its way
    through the client, in the client's own thread."""

    def __init__(self, client: tinker.ServiceClient) -> None:
        # Where the client turns an answer into its samples.
        sampling_client._attach_sequence_ids = _without_ids  # pyright: ignore[reportPrivateUsage]
        self._client = client
        self._holder = client.holder
        self._session_id = self._holder.get_session_id()
        # By kind of call, without kinds whose latest call was answered.
        self._troubles: dict[ClientConnectionPoolType, _Unanswered] = {}
        self._watch_calls()

    @classmethod
    async def open_session(cls, config: TinkerConfig, run_id: str) -> Self:
        """Open a session. Raises ConfigError without a key, and the client's errors."""
        client = await open_service(config, run_id=run_id)
        # The client opens it with its first call, which blocks until there is one.
        await asyncio.to_thread(lambda: client.holder)
        return cls(client)

    @property
    def trouble(self) -> str:
        """Why the service answers nobody for now; empty if it answers."""
        newest = max(self._troubles.copy().values(), default=None)
        fresh = newest is not None and newest.when > time.monotonic() - _FRESH_S
        return newest.why if newest is not None and fresh else ""

    def note_answer(self) -> None:
        """Note that a request was answered: whatever failed before, the service is there."""
        self._troubles.clear()

    async def open_sampler(self, address: str) -> tinker.SamplingClient:
        """Return a client that samples with saved weights. Raises the client's errors."""
        return await self._client.create_sampling_client(model_path=address).result_async()

    async def has_ended(self) -> bool:
        """Return whether the service says so; False if it says nothing. A service that says nothing
        is in trouble from then on."""
        try:
            async with asyncio.timeout(_BEAT_S):
                await self._holder.run_coroutine_threadsafe(self._beat())
        except Exception as error:  # noqa: BLE001 - whatever it is, `classify` knows it
            return classify(error) is Trouble.GONE
        return False

    async def close(self) -> None:
        """Finish the session, if the service answers soon."""
        with suppress(Exception):
            await self._client.close("success").result_async(_CLOSE_S)
        self._holder.close()

    async def _beat(self) -> None:
        with self._holder.aclient(ClientConnectionPoolType.SESSION) as client:
            await client.service.session_heartbeat(
                session_id=self._session_id, max_retries=0, timeout=_BEAT_S - 1
            )

    def _watch_calls(self) -> None:
        call = self._holder.aclient

        @contextmanager
        def watched(client_pool_type: ClientConnectionPoolType) -> Generator[Any]:
            try:
                with call(client_pool_type) as client:
                    yield client
            except Exception as error:
                reached = isinstance(error, tinker.APIStatusError)
                self._note(client_pool_type, _read_trouble(error), reached=reached)
                raise
            self._note(client_pool_type, "", reached=True)

        self._holder.aclient = watched

    def _note(self, kind: ClientConnectionPoolType, trouble: str, *, reached: bool) -> None:
        if reached:
            kept = {key: each for key, each in self._troubles.items() if each.reached}
            kept.pop(kind, None)
            self._troubles = kept
        if trouble and kind is not ClientConnectionPoolType.TELEMETRY:
            self._troubles[kind] = _Unanswered(time.monotonic(), trouble, reached)


def _without_ids(
    response: types.SampleResponse, sample_sequence_ids: list[str] | None
) -> types.SampleResponse:
    """Leave samples without ids: nothing here reads them, and SkyRL's server, of the protocol of
    client 0.25, names none, for which the client would refuse its samples."""
    return response


def _read_trouble(error: Exception) -> str:
    """Return why a call was not answered for now; empty if it was answered, be it by a refusal."""
    if classify(error) is not Trouble.WAIT:
        return ""
    if not isinstance(error, tinker.APIStatusError) or error.status_code != _NOT_YET:
        return describe(error)
    # A poll for a result that is not there yet, which names what the request waits for.
    body: Any = error.body
    state = body.get("queue_state") if isinstance(body, dict) else None
    if state not in ("paused_capacity", "paused_rate_limit"):
        return ""
    return f"the Tinker service is {state}: {body.get('queue_state_reason') or 'no reason given'}"
