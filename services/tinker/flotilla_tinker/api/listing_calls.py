"""Calls about models and checkpoints that exist."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from flotilla_tinker.api.calls import ApiAnswer, ApiRefusal, ClientCall, Front, answer_json
from flotilla_tinker.types import CheckpointRecord, ModelRecord
from flotilla_tinker.wire.bodies import TtlBody, WeightsInfoBody
from flotilla_tinker.wire.checkpoint_paths import CheckpointPath, read_path
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.wire.model_orders import ADAM
from flotilla_tinker.work.desk_errors import BadOrder

_PAGE, _MOST = 20, 1000
T = TypeVar("T")


async def weights_info(front: Front, call: ClientCall) -> ApiAnswer:
    path = str(read_path(read_json(call.body, WeightsInfoBody).tinker_path))
    saved = await front.desk.describe_checkpoint(call.tenant, path)
    settings = (await front.desk.describe_model(call.tenant, saved.model_id)).settings
    lora = settings.lora_rank > 0
    return answer_json(
        base_model=settings.base_model,
        optimizer_config={"type": ADAM},
        is_lora=lora,
        lora_rank=settings.lora_rank or None,
        # Never adapted, and always trained with the rest.
        train_unembed=not lora,
        train_mlp=settings.train_mlp,
        train_attn=settings.train_attention,
    )


async def list_training_runs(front: Front, call: ClientCall) -> ApiAnswer:
    models = await front.desk.list_models(call.tenant)
    saved = await front.desk.list_checkpoints(call.tenant, None)
    page, cursor = _cut_page(models, call.query)
    return answer_json(training_runs=[_show_model(each, saved) for each in page], cursor=cursor)


async def describe_training_run(front: Front, call: ClientCall) -> ApiAnswer:
    model_id = call.path["model_id"]
    model = await front.desk.describe_model(call.tenant, model_id)
    saved = await front.desk.list_checkpoints(call.tenant, model_id)
    return answer_json(**_show_model(model, saved))


async def list_model_checkpoints(front: Front, call: ClientCall) -> ApiAnswer:
    saved = await front.desk.list_checkpoints(call.tenant, call.path["model_id"])
    return answer_json(checkpoints=[_show_checkpoint(each) for each in saved])


async def list_checkpoints(front: Front, call: ClientCall) -> ApiAnswer:
    saved = await front.desk.list_checkpoints(call.tenant, None)
    page, cursor = _cut_page(saved, call.query)
    return answer_json(checkpoints=[_show_checkpoint(each) for each in page], cursor=cursor)


async def delete_checkpoint(front: Front, call: ClientCall) -> ApiAnswer:
    await front.desk.delete_checkpoint(call.tenant, _path_of(call))
    return answer_json()


async def set_ttl(front: Front, call: ClientCall) -> ApiAnswer:
    ttl_s = read_json(call.body, TtlBody).ttl_seconds
    await front.desk.set_ttl(call.tenant, _path_of(call), ttl_s)
    return answer_json()


async def archive(front: Front, call: ClientCall) -> ApiAnswer:
    """Send a checkpoint's files as one tar."""
    file = await front.desk.archive(call.tenant, _path_of(call))
    return ApiAnswer(200, content_type="application/x-tar", file=file)


async def refuse_publishing(front: Front, call: ClientCall) -> ApiAnswer:
    raise ApiRefusal(403, "checkpoints are not published: this server shows each key its own only")


def _path_of(call: ClientCall) -> str:
    place = call.path
    return str(read_path(str(CheckpointPath(place["model_id"], place["kind"], place["name"]))))


def _cut_page(items: Sequence[T], query: Mapping[str, str]) -> tuple[Sequence[T], dict[str, int]]:
    limit = min(_read_count(query, "limit", _PAGE), _MOST)
    offset = _read_count(query, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _read_count(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadOrder(f"{name}: {text[:20]!r} is no whole number from 0")
    return int(text)


def _show_model(model: ModelRecord, saved: Sequence[CheckpointRecord]) -> dict[str, Any]:
    newest = {
        each.kind: _show_checkpoint(each)
        for each in sorted(saved, key=lambda each: each.created_s)
        if each.model_id == model.model_id
    }
    settings = model.settings
    return {
        "training_run_id": model.model_id,
        "base_model": settings.base_model,
        "model_owner": model.tenant,
        "is_lora": settings.lora_rank > 0,
        "lora_rank": settings.lora_rank or None,
        "last_request_time": _show_time(model.created_s),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": {key: str(value) for key, value in settings.user_metadata.items()} or None,
    }


def _show_checkpoint(saved: CheckpointRecord) -> dict[str, Any]:
    path = read_path(saved.path)
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": saved.kind,
        "time": _show_time(saved.created_s),
        "tinker_path": saved.path,
        "size_bytes": saved.size_bytes,
        "public": saved.public,
        "expires_at": None if saved.expires_s is None else _show_time(saved.expires_s),
    }


def _show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
