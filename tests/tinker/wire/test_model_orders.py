import re
from typing import Any

import msgspec
import pytest

from flotilla_tinker.types import AdamSettings, Kind, LoadOrder, ModelSettings, SaveOrder
from flotilla_tinker.wire.checkpoint_paths import read_path
from flotilla_tinker.wire.json_bodies import write_json
from flotilla_tinker.wire.model_orders import (
    read_create_model,
    read_load,
    read_optim_step,
    read_save,
)
from flotilla_tinker.wire.wire_error import WireError


def _body(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def _create(**fields: Any) -> bytes:
    return _body(session_id="s1", model_seq_id=0, base_model="m", type="create_model", **fields)


def test_a_models_settings_are_read() -> None:
    lora = {"rank": 16, "seed": 7, "train_unembed": True, "train_mlp": False, "train_attn": True}
    body = _create(
        lora_config=lora, optimizer_config={"type": "adamw"}, user_metadata={"renderer": "r"}
    )

    settings = read_create_model(body)

    assert settings == ModelSettings(
        base_model="m", lora_rank=16, seed=7, train_mlp=False, user_metadata={"renderer": "r"}
    )


def test_a_model_without_adapters_trains_all_weights() -> None:
    assert read_create_model(_create()).lora_rank == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_config": {"rank": -1}}, "$.lora_config.rank"),
        ({"lora_config": {"rank": 8, "train_mlp": False, "train_attn": False}}, "must be true"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "'dimuon' is not offered"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        read_create_model(_create(**fields))


def test_an_update_is_read_with_the_sdks_defaults() -> None:
    body = _body(model_id="m", seq_id=2, adam_params={"learning_rate": 0.5}, type="optim_step")

    assert read_optim_step(body) == AdamSettings(learning_rate=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "optim_step needs adam_params"),
        ({"optimizer_params": {"type": "dimuon"}}, "no other optimizer"),
        ({"adam_params": {"beta1": 1.0}}, "$.adam_params.beta1"),
        ({"adam_params": {"learning_rate": "fast"}}, "$.adam_params.learning_rate"),
        # The next number would not fit the journal.
        ({"seq_id": 2**63 - 1, "adam_params": {}}, "`int` <= 2147483647 - at `$.seq_id`"),
    ],
)
def test_an_update_that_cannot_be_made_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        read_optim_step(_body(**{"model_id": "m", "seq_id": 2, **fields}))


def test_a_save_has_a_name_or_opens_a_sampler() -> None:
    named = _body(model_id="m", seq_id=2, path="0001", ttl_seconds=3600, overwrite=True)
    inflight = _body(model_id="m", seq_id=2, sampling_session_seq_id=3, kind="inflight")

    assert read_save(named) == SaveOrder("0001", ttl_s=3600, overwrite=True)
    assert read_save(inflight) == SaveOrder(None, 3, kind="inflight")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "../x"}, "is no name of a checkpoint"),
        ({"path": ""}, "is no name of a checkpoint"),
        ({"path": "a", "sampling_session_seq_id": 1}, "send either path"),
        ({"kind": "inflight"}, "kind inflight needs sampling_session_seq_id"),
        ({"kind": "live", "sampling_session_seq_id": 1}, "$.kind"),
        ({"ttl_seconds": 0}, "$.ttl_seconds"),
    ],
)
def test_a_save_that_cannot_be_made_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        read_save(_body(model_id="m", seq_id=2, **fields))


def test_a_load_names_a_saved_state() -> None:
    path = "tinker://s1:train:0/weights/0001"

    assert read_load(_body(path=path, optimizer=True)) == LoadOrder(path, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "tinker://s/sampler_weights/a"}, "can only be sampled with"),
        ({"path": "/etc/passwd"}, "is no path of a checkpoint"),
        ({"path": "tinker://s/weights/a/b"}, "is no path of a checkpoint"),
        ({"path": "tinker://s/weights/a", "weights_access_token": "t"}, "weights_access_token"),
    ],
)
def test_a_load_of_anything_else_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        read_load(_body(optimizer=False, **fields))


def test_a_path_is_split_and_put_together() -> None:
    path = "tinker://s1:train:0/sampler_weights/0001"

    assert read_path(path) == ("s1:train:0", "sampler_weights", "0001")
    assert str(read_path(path)) == path


def test_a_result_in_json_names_its_kind() -> None:
    result = write_json(Kind.SAVE_WEIGHTS, path="tinker://m/weights/a")

    assert msgspec.json.decode(result.body) == {
        "type": "save_weights",
        "path": "tinker://m/weights/a",
    }
