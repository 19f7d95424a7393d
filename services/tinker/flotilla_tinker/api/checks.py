"""Checks of orders against what is trained and sampled here. Each raises BadOrder."""

import numpy as np
from numpy.typing import NDArray

from flotilla_tinker.types import (
    BaseFacts,
    EngineFacts,
    LossBatch,
    ModelSettings,
    SampleOrder,
)
from flotilla_tinker.work.desk_errors import BadOrder


def check_base(name: str | None, base: BaseFacts) -> None:
    """Refuse another model than the one that is served."""
    if name is not None and name != base.model:
        raise BadOrder(f"base_model: there is no {name!r} here; this server has {base.model!r}")


def check_model(settings: ModelSettings, base: BaseFacts, engine: EngineFacts) -> None:
    """Refuse a model that could not be trained, or not be sampled from."""
    check_base(settings.base_model, base)
    most, where = min((base.max_rank, "learner"), (engine.max_rank, "rollout"))
    if settings.lora_rank > most:
        raise BadOrder(
            f"lora_config.rank is {settings.lora_rank}; the {where} of this server has room for"
            f" {most}"
        )


def check_batch(batch: LossBatch, base: BaseFacts) -> None:
    """Refuse losses, lengths and token ids that the trainer would refuse."""
    if batch.loss not in base.losses:
        raise BadOrder(f"loss_fn is {batch.loss!r}; this server has {', '.join(base.losses)}")
    for number, sequence in enumerate(batch.sequences):
        where = f"data[{number}]"
        if (length := len(sequence.token_ids)) > base.max_model_len:
            raise BadOrder(
                f"{where}.model_input has {length} tokens; this server trains on up to"
                f" {base.max_model_len}"
            )
        _check_ids(sequence.token_ids, base.vocabulary, f"{where}.model_input")
        targets = f"{where}.loss_fn_inputs.target_tokens"
        _check_ids(sequence.target_ids, base.vocabulary, targets)


def check_sample(order: SampleOrder, engine: EngineFacts) -> None:
    """Refuse prompts and answers that do not fit into the window."""
    prompt, window = len(order.prompt_ids), engine.max_model_len
    if prompt + max(1, order.max_tokens) > window:
        raise BadOrder(
            f"the prompt has {prompt} tokens, and max_tokens is {order.max_tokens or 'not given'};"
            f" together they exceed this server's window of {window} tokens"
        )
    _check_ids(order.prompt_ids, engine.vocabulary, "prompt")
    _check_ids(np.array(order.stop_ids, np.int64), engine.vocabulary, "sampling_params.stop")


def _check_ids(ids: "NDArray[np.integer]", vocabulary: int, where: str) -> None:
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if wrong.size:
        raise BadOrder(f"{where} has the token {wrong[0]}; the vocabulary has {vocabulary}")
