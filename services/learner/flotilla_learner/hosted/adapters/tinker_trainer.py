"""The service through Tinker's own client. Implements `hosted.ports.HostedService`.

The client numbers a model's orders from 1 on in each process; a later process goes on with the
numbers of an earlier one, and repeats them if need be. That takes three of the client's internals,
which its version pins: a session's id, a model's id, and the counters of a training client."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import tinker
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.public_interfaces.training_client import fetch_training_info
from tinker.lib.retryable_exception import RetryableException
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.resources import training as training_resource

from flotilla_common.adapters.tinker_service import (
    Trouble,
    classify,
    describe,
    find_silence,
    open_service,
)
from flotilla_common.aio.concurrency import cancel_tasks, wait_beside
from flotilla_common.spec.spec import TinkerConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.hosted.ports import (
    Answer,
    HostedModel,
    Order,
    SaveOrder,
    ServiceGoneError,
    ServiceRefusedError,
)
from flotilla_learner.training_types import TargetBatch, TargetScores, TargetSequence

_log = get_logger(__name__)
T = TypeVar("T")
# How often a wait is reported.
SAY_S = 60.0
_ANSWER_S = 10.0
_LONGEST_PAUSE_S = 30.0
# A result that was dropped is asked for again once: the order was not carried out, or is lost.
_MOST_DROPPED = 1
_CLOSE_S = 20.0
_DELETE_S = 30.0


class TinkerTrainer:
    """One model of a run, in one session."""

    def __init__(
        self,
        config: TinkerConfig,
        base_model: str,
        lora_rank: int,
        seed: int,
        run_id: str,
        *,
        note_progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Create it; `note_progress` is called while something is waited for."""
        # Where the client turns a batch into a message.
        sending: Any = training_resource
        sending.forward_backward_request_to_proto = StableRequest
        self._config = config
        self._base_model = base_model
        self._lora_rank = lora_rank
        self._seed = seed
        self._run_id = run_id
        self._note_progress = note_progress
        self._holder: InternalClientHolder | None = None
        self._model: HostedModel | None = None
        self._info: types.GetInfoResponse | None = None

    async def create_model(self) -> HostedModel:
        def create(client: tinker.ServiceClient) -> Any:
            # As in our own ranks, the head is not adapted.
            return client.create_lora_training_client(
                self._base_model, self._lora_rank, self._seed, train_unembed=False
            )

        return await self._open("a new model", create)

    async def load_model(self, address: str) -> HostedModel:
        def load(client: tinker.ServiceClient) -> Any:
            return client.create_training_client_from_state_with_optimizer(address)

        purpose = "the saved model"
        try:
            return await self._open(purpose, load)
        except ServiceRefusedError as error:
            if not isinstance(error.__cause__, tinker.UnprocessableEntityError):
                raise
        # SkyRL's server, which speaks the protocol of client 0.25, loads into a new model only.
        model = await self.create_model()
        await self._patiently(
            purpose, lambda: self._client_from(1).load_state_with_optimizer(address)
        )
        return replace(model, first_order=2)

    async def _open(
        self, purpose: str, create: Callable[[tinker.ServiceClient], Any]
    ) -> HostedModel:
        """Open a session and make a model in it."""
        await self._leave()
        client = await open_service(self._config, run_id=self._run_id)

        async def make() -> Any:
            # The client opens its session here, and blocks.
            return await (await asyncio.to_thread(create, client))

        trainer = await self._patiently(purpose, make)
        self._holder = trainer.holder
        self._info = trainer.get_info()
        self._model = HostedModel(trainer.holder.get_session_id(), trainer.model_id)
        return self._model

    async def attach_model(self, model: HostedModel) -> None:
        await self._patiently("the model of the run", lambda: self._attach(model))

    async def _attach(self, model: HostedModel) -> None:
        await self._leave()
        # It checks the key, and passes on the client's warnings.
        await open_service(self._config, run_id=self._run_id)
        holder = await asyncio.to_thread(
            InternalClientHolder, session_id=model.session_id, base_url=self._config.url
        )
        self._holder, self._model = holder, model
        await holder.run_coroutine_threadsafe(_show_life(holder, model.session_id))
        info = await holder.run_coroutine_threadsafe(fetch_training_info(holder, model.model_id))
        if info.lora_rank not in (None, self._lora_rank):
            raise ServiceRefusedError(
                f"learner.lora.rank: {self._lora_rank}, but the run trains {info.lora_rank}: set it"
                " to that, or start a new run"
            )
        self._info = info

    async def carry_out(
        self, orders: Sequence[Order], first: int, purpose: str
    ) -> tuple[list[Answer], int]:
        return await self._patiently(purpose, lambda: self._carry_out(orders, first))

    async def _carry_out(self, orders: Sequence[Order], first: int) -> tuple[list[Answer], int]:
        """Send all orders before waiting for any. Each attempt has a training client of its own: a
        failed one takes no more."""
        client = self._client_from(first)
        sent = [asyncio.ensure_future(_send(client, order)) for order in orders]
        try:
            answers: list[Any] = await asyncio.gather(*sent)
        finally:
            await cancel_tasks(sent)
        following: int = client._request_id_counter + 1
        return [_answer_of(*pair) for pair in zip(orders, answers, strict=True)], following

    def _client_from(self, first: int) -> Any:
        assert self._holder is not None
        assert self._model is not None
        assert self._info is not None
        client: Any = tinker.TrainingClient(self._holder, 0, self._model.model_id, info=self._info)
        client._request_id_counter = client._turn_counter = first - 1
        return client

    async def delete(self, address: str) -> bool:
        try:
            async with asyncio.timeout(_DELETE_S):
                rest = await asyncio.to_thread(tinker.RestClient, base_url=self._config.url)
                await rest.delete_checkpoint_from_tinker_path(address)
        except Exception as error:  # noqa: BLE001 - whatever the client raises, the run goes on
            if classify(error) is Trouble.GONE:
                return True
            _log.warning("cannot delete at the service", address=address, why=describe(error))
            return False
        return True

    async def close(self, *, finish: bool) -> None:
        if finish and self._holder is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._holder.run_coroutine_threadsafe(_finish_session(self._holder))
            except Exception as error:  # noqa: BLE001 - the session lapses by itself
                _log.warning("the session is left to lapse", why=describe(error))
        await self._leave()

    async def _leave(self) -> None:
        """Let go of a session without ending it: another process may take it up."""
        holder, self._holder = self._holder, None
        if holder is not None:
            await holder.run_coroutine_threadsafe(holder.aclose())

    async def _patiently(self, purpose: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat what the service cannot do for now, and say once a minute that it is waited for.

        Raises ServiceGoneError and ServiceRefusedError."""
        main = asyncio.create_task(self._repeat(purpose, attempt))
        watch = asyncio.create_task(self._watch(purpose))
        try:
            return await wait_beside(main, [watch])
        finally:
            await cancel_tasks([main, watch])

    async def _repeat(self, purpose: str, attempt: Callable[[], Awaitable[T]]) -> T:
        failed_at, pause_s, dropped = None, 1.0, 0
        while True:
            try:
                return await attempt()
            except Exception as error:
                trouble, why = classify(error), describe(error)
                failed_at = failed_at or time.monotonic()
                dropped += isinstance(error, RetryableException)
                if trouble is Trouble.GONE or dropped > _MOST_DROPPED:
                    raise ServiceGoneError(f"{purpose}: {why}") from error
                if trouble is Trouble.REFUSED:
                    raise ServiceRefusedError(f"{purpose}: {why}") from error
                self._check_patience(purpose, failed_at, why)
                _log.warning("trying again", purpose=purpose, why=why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _watch(self, purpose: str) -> None:
        """Say what is waited for, and end the wait for a service that does not answer: the client
        asks for a result forever."""
        since = heard_at = time.monotonic()
        while True:
            await asyncio.sleep(SAY_S)
            self._note_progress()
            silence = await self._find_silence()
            heard_at = heard_at if silence else time.monotonic()
            self._check_patience(purpose, heard_at, silence)
            waited_s = round(time.monotonic() - since)
            _log.info("waiting for the service", purpose=purpose, seconds=waited_s, why=silence)

    def _check_patience(self, purpose: str, since: float, why: str) -> None:
        waited_s = time.monotonic() - since
        if waited_s > self._config.patience_s:
            raise ServiceRefusedError(
                f"{purpose}: the service was away for {waited_s:.0f} s, longer than"
                f" policy.tinker.patience_s: {why}"
            )

    async def _find_silence(self) -> str:
        """Return why the service does not answer; "" if it does."""
        if self._holder is None or self._model is None:
            return await find_silence(self._config)
        life = _show_life(self._holder, self._model.session_id)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._holder.run_coroutine_threadsafe(life)
        except Exception as error:  # noqa: BLE001 - the client raises all kinds
            return describe(error) if classify(error) is Trouble.WAIT else ""
        return ""


def _send(client: Any, order: Order) -> Awaitable[Any]:
    if isinstance(order, TargetBatch):
        send = client.forward if order.forward_only else client.forward_backward
        loss: Any = order.loss
        return send([make_datum(row) for row in order.sequences], loss, dict(order.options) or None)
    if isinstance(order, SaveOrder):
        save = client.save_state if order.kind == "state" else client.save_weights_for_sampler
        return save(order.name)
    return client.optim_step(
        types.AdamParams(
            learning_rate=order.learning_rate,
            beta1=order.beta1,
            beta2=order.beta2,
            eps=order.eps,
            weight_decay=order.weight_decay,
            grad_clip_norm=order.grad_clip_norm,
        )
    )


def make_datum(row: TargetSequence) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": row.target_ids, **row.inputs}
    ids = types.ModelInput.from_ints(row.token_ids.tolist())
    return types.Datum(model_input=ids, loss_fn_inputs=inputs)


def _answer_of(order: Order, answer: Any) -> Answer:
    if isinstance(order, TargetBatch):
        found = [np.array(each["logprobs"].data, np.float32) for each in answer.loss_fn_outputs]
        return TargetScores(found, dict(answer.metrics))
    if isinstance(order, SaveOrder):
        return _with_kind(str(answer.path))
    metrics: Mapping[str, float] | None = getattr(answer, "metrics", None)
    return dict(metrics or {})


def _with_kind(address: str) -> str:
    """Return an address by which saves are deleted: SkyRL's server names no kind for samplers'."""
    model, name = address.rsplit("/", 1)
    return address if model.count("/") > 2 else f"{model}/sampler_weights/{name}"


async def _show_life(holder: InternalClientHolder, session_id: str) -> None:
    """Raise the service's refusal if a session has ended."""
    with holder.aclient(ClientConnectionPoolType.SESSION) as client:
        await client.service.session_heartbeat(
            session_id=session_id, max_retries=0, timeout=_ANSWER_S
        )


async def _finish_session(holder: InternalClientHolder) -> None:
    with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
        await client.post(
            f"/api/v1/sessions/{holder.get_session_id()}/finish",
            body={"reason": {"type": "success"}, "detail": None},
            cast_to=type(None),
        )


class StableRequest:
    """A batch as the client sends it, but as the same bytes in all processes.

    Protobuf orders its maps at random, anew in each process; a service that compares a repeated
    order with the first one finds them different then."""

    def __init__(self, request: types.ForwardBackwardRequest) -> None:
        self._message = forward_backward_request_to_proto(request)
        self.forward_only = False

    def SerializeToString(self) -> bytes:
        self._message.forward_only = self.forward_only
        return self._message.SerializeToString(deterministic=True)
