"""Calls that train, save and load models: each is an order of a model."""

from collections.abc import Callable
from functools import wraps

from flotilla_common.text.parsing import run_aside
from flotilla_tinker.api.calls import ApiAnswer, ApiRefusal, ClientCall, Front, Handler, answer_json
from flotilla_tinker.api.checks import check_base, check_batch, check_model
from flotilla_tinker.types import ClientOrder, Kind
from flotilla_tinker.wire.bodies import (
    CreateModelBody,
    LoadWeightsBody,
    ModelBody,
    OptimStepBody,
    SaveBody,
)
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.wire.loss_batches import read_loss_order
from flotilla_tinker.wire.model_orders import (
    ADAM,
    read_create_model,
    read_load,
    read_optim_step,
    read_place,
    read_save,
)
from flotilla_tinker.wire.wire_error import WireError
from flotilla_tinker.work.desk_errors import BadOrder, NotFound, TooLarge

_TRAIN = ":train:"


def passing_over(
    handle: Handler, read: Callable[[bytes], tuple[str, int] | None] = read_place
) -> Handler:
    """Return the handler of a model's orders, which has later ones not wait for what it refuses.

    The SDK has counted a refused order, and its next one has the next number."""

    @wraps(handle)
    async def handle_numbered(front: Front, call: ClientCall) -> ApiAnswer:
        try:
            return await handle(front, call)
        except (WireError, BadOrder, NotFound, TooLarge, ApiRefusal):
            if (place := read(call.body)) is not None:
                await front.desk.pass_over(call.tenant, *place)
            raise

    return handle_numbered


async def create_model(front: Front, call: ClientCall) -> ApiAnswer:
    settings = read_create_model(call.body)
    check_model(settings, *await front.facts.get())
    given = read_json(call.body, CreateModelBody)
    model_id = f"{given.session_id}{_TRAIN}{given.model_seq_id}"
    return await _submit(front, call, Kind.CREATE_MODEL, model_id, 0)


async def unload_model(front: Front, call: ClientCall) -> ApiAnswer:
    """Unload a model after all that was ordered before; the request has no number of its own."""
    model_id = read_json(call.body, ModelBody).model_id
    model = await front.desk.describe_model(call.tenant, model_id)
    return await _submit(front, call, Kind.UNLOAD_MODEL, model_id, model.last_seq + 1)


async def get_info(front: Front, call: ClientCall) -> ApiAnswer:
    model_id = read_json(call.body, ModelBody).model_id
    settings = (await front.desk.describe_model(call.tenant, model_id)).settings
    name = settings.base_model
    return answer_json(
        type="get_info",
        model_id=model_id,
        model_name=name,
        model_data={"model_name": name, "tokenizer_id": name},
        is_lora=settings.lora_rank > 0,
        lora_rank=settings.lora_rank or None,
        optimizer_config={"type": ADAM},
    )


async def forward_backward(front: Front, call: ClientCall) -> ApiAnswer:
    base, _ = await front.facts.get()
    # Its arrays are read and compared, megabytes at a time.
    model_id, seq_id, batch = await run_aside(len(call.body), lambda: read_loss_order(call.body))
    await run_aside(len(call.body), lambda: check_batch(batch, base))
    kind = Kind.FORWARD if batch.forward_only else Kind.FORWARD_BACKWARD
    return await _submit(front, call, kind, model_id, _from_one(seq_id))


async def optim_step(front: Front, call: ClientCall) -> ApiAnswer:
    read_optim_step(call.body)
    given = read_json(call.body, OptimStepBody)
    return await _submit(front, call, Kind.OPTIM_STEP, given.model_id, _from_one(given.seq_id))


async def save_weights(front: Front, call: ClientCall) -> ApiAnswer:
    return await _save(front, call, Kind.SAVE_WEIGHTS)


async def save_weights_for_sampler(front: Front, call: ClientCall) -> ApiAnswer:
    return await _save(front, call, Kind.SAVE_WEIGHTS_FOR_SAMPLER)


async def _save(front: Front, call: ClientCall, kind: Kind) -> ApiAnswer:
    read_save(call.body)
    given = read_json(call.body, SaveBody)
    return await _submit(front, call, kind, given.model_id, _from_one(given.seq_id))


async def load_weights(front: Front, call: ClientCall) -> ApiAnswer:
    """Load a saved state into a model, or into a new one, whose order 0 it then is."""
    order = read_load(call.body)
    given = read_json(call.body, LoadWeightsBody)
    # Else it would only be missed once the model's turn comes.
    saved = await front.desk.describe_checkpoint(call.tenant, order.path)
    if given.model_id is not None:
        seq_id = _from_one(given.seq_id or 0)
        return await _submit(front, call, Kind.LOAD_WEIGHTS, given.model_id, seq_id)
    if given.session_id is None or given.model_seq_id is None:
        raise BadOrder("send model_id and seq_id, or for a new model session_id and model_seq_id")
    base, engine = await front.facts.get()
    check_base(given.base_model, base)
    settings = (await front.desk.describe_model(call.tenant, saved.model_id)).settings
    check_model(settings, base, engine)
    model_id = f"{given.session_id}{_TRAIN}{given.model_seq_id}"
    return await _submit(front, call, Kind.LOAD_WEIGHTS, model_id, 0)


def _from_one(seq_id: int) -> int:
    if seq_id < 1:
        raise BadOrder("seq_id: a model's orders are numbered from 1")
    return seq_id


async def _submit(
    front: Front, call: ClientCall, kind: Kind, model_id: str, seq_id: int
) -> ApiAnswer:
    session_id, found, _ = model_id.partition(_TRAIN)
    if not found:
        raise NotFound(f"there is no model {model_id!r}")
    order = ClientOrder(
        kind=kind,
        tenant=call.tenant,
        session_id=session_id,
        model_id=model_id,
        seq_id=seq_id,
        body=call.body,
    )
    accepted = await front.desk.submit(order)
    return answer_json(request_id=accepted.request_id, model_id=model_id)
