"""The service as a process, over gRPC: what a client of TrainingService sees."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flotilla.learner.v1 import training_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_learner.training_types import TargetBatch, TargetScores
from tests.support.target_batches import equal, make_batch
from tests.support.training_process import TrainingProcess, training_process

pytestmark = pytest.mark.timeout(600)


@pytest_asyncio.fixture
async def service(tmp_path: Path, model_folder: Path) -> AsyncGenerator[TrainingProcess]:
    async with training_process(tmp_path, model_folder) as process:
        yield process


async def reason_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return rpc.refusal_reason(caught.value)


async def train(service: TrainingProcess, model: str, numbers: range) -> list[TargetScores]:
    """Operations of one model: a gradient, then an update, and so on."""
    found: list[TargetScores] = []
    for number in numbers:
        if number % 2:
            found.append(await service.accumulate(model, number, make_batch(seed=number)))
        else:
            await service.update(model, number)
    return found


def peft_logprobs(model: Any, batch: TargetBatch) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for sequence in batch.sequences:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        targets = torch.from_numpy(sequence.target_ids)
        found.append(logprobs.gather(1, targets[:, None]).squeeze(1).numpy())
    return found


async def test_a_client_trains_and_exports_what_peft_loads(
    service: TrainingProcess, model_folder: Path, tmp_path: Path
) -> None:
    described = await service.stub.DescribeBase(pb.DescribeBaseRequest())
    assert (described.max_model_len, described.vocabulary, described.max_rank) == (64, 97, 8)
    assert (described.max_models, described.models) == (3, {})
    created = await service.create("a", seed=3)
    assert created.operation == 0 < created.trainable_parameters
    first, second = await train(service, "a", range(1, 5))
    assert second.metrics["loss:sum"] != first.metrics["loss:sum"]
    # The second model is the base.
    await service.create("b", rank=8)
    batch = make_batch("importance_sampling", forward_only=True)
    untrained = await service.accumulate("b", 0, batch)
    exported = await service.export("a", 4, tmp_path / "adapter")
    again = await service.export("a", 4, tmp_path / "adapter")
    assert exported == again
    assert len(exported.fingerprint) == 32
    base: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for one, other in zip(untrained.logprobs, peft_logprobs(base, batch), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    own = await service.accumulate("a", 0, batch)
    assert not equal(own, untrained)
    for one, other in zip(own.logprobs, peft_logprobs(loaded, batch), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    described = await service.stub.DescribeBase(pb.DescribeBaseRequest())
    assert described.models == {"a": 4, "b": 0}


async def test_operations_are_carried_out_once_and_in_order(
    service: TrainingProcess, tmp_path: Path
) -> None:
    await service.create("a")
    batch = make_batch()
    first = await service.accumulate("a", 1, batch)
    # Its answer was lost, and it is asked for again.
    assert equal(await service.accumulate("a", 1, batch), first)
    norm = await service.update("a", 2)
    assert await service.update("a", 2) == norm
    assert await reason_of(service.accumulate("a", 2, batch)) == "OUT_OF_ORDER"
    assert await reason_of(service.update("a", 4)) == "OUT_OF_ORDER"
    assert await reason_of(service.save("a", 1, tmp_path / "s")) == "OUT_OF_ORDER"
    assert (await service.create("a")).operation == 2
    assert await reason_of(service.create("a", rank=8)) == "MODEL_EXISTS"


@pytest.mark.parametrize("patience_s", [0.0, 0.02, 0.1])
async def test_a_caller_that_goes_away_may_ask_again(
    service: TrainingProcess, patience_s: float
) -> None:
    await service.create("a")
    await service.create("b")
    batch = make_batch(count=60)
    # A fast machine answers before the longest patience ends.
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await service.accumulate("a", 1, batch)
    again = await service.accumulate("a", 1, batch)
    assert equal(again, await service.accumulate("b", 1, batch))
    # It was accumulated once.
    assert await service.update("a", 2) == await service.update("b", 2)


async def test_after_the_ranks_are_lost_a_replay_gives_the_same_weights(
    service: TrainingProcess, tmp_path: Path
) -> None:
    await service.create("a", seed=1)
    await train(service, "a", range(1, 5))
    assert await service.save("a", 4, tmp_path / "state") > 0
    await train(service, "a", range(5, 9))
    await service.export("a", 8, tmp_path / "one")
    for pid in service.rank_pids:
        os.kill(pid, signal.SIGKILL)
    assert await reason_of(service.accumulate("a", 9, make_batch())) == "RANKS_LOST"
    assert await reason_of(service.update("a", 9)) == "MODEL_UNKNOWN"
    await service.create("a", seed=1)
    await service.load("a", 1, tmp_path / "state")
    # The numbers start anew, and the seeds of the batches are the old ones.
    for number in (5, 7):
        await service.accumulate("a", number - 3, make_batch(seed=number))
        await service.update("a", number - 2)
    await service.export("a", 5, tmp_path / "other")
    name = "adapter_model.safetensors"
    one, other = (load_file(tmp_path / folder / name) for folder in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


async def test_models_are_created_and_deleted_within_limits(service: TrainingProcess) -> None:
    for model in ("a", "b", "c"):
        await service.create(model)
    assert await reason_of(service.create("d")) == "TOO_MANY_MODELS"
    await service.stub.DeleteModel(pb.DeleteModelRequest(model_id="b"))
    await service.stub.DeleteModel(pb.DeleteModelRequest(model_id="b"))
    assert await reason_of(service.create("d", rank=9)) == "BAD_SETTINGS"
    nothing = {"train_attention": False, "train_mlp": False}
    assert await reason_of(service.create("d", **nothing)) == "BAD_SETTINGS"
    await service.create("d")
    await train(service, "a", range(1, 3))
    assert await reason_of(service.update("b", 1)) == "MODEL_UNKNOWN"


async def test_what_cannot_be_trained_on_is_refused_and_changes_nothing(
    service: TrainingProcess, tmp_path: Path
) -> None:
    await service.create("a")
    batch = make_batch()
    calls = {
        "BAD_BATCH": service.accumulate("a", 1, TargetBatch("ppo", {"beta": 1}, batch.sequences)),
        "UNKNOWN_LOSS": service.accumulate("a", 1, TargetBatch("sft", {}, batch.sequences)),
        "BAD_SETTINGS": service.update("a", 1, beta1=1.0),
        "NO_STATE": service.load("a", 1, tmp_path),
        "FOLDER_UNUSABLE": service.save("a", 0, tmp_path),
    }
    for reason, call in calls.items():
        assert await reason_of(call) == reason
    await train(service, "a", range(1, 3))


async def test_a_model_of_rank_0_has_ranks_of_its_own_and_exports_a_whole_model(
    tmp_path: Path, engine_folder: Path
) -> None:
    async with training_process(tmp_path, engine_folder) as service:
        await service.create("small")
        (base,) = service.rank_pids
        created = await service.create("whole", rank=0)
        _, own = service.rank_pids
        described = await service.stub.DescribeBase(pb.DescribeBaseRequest())
        assert created.trainable_parameters == described.parameters
        await train(service, "whole", range(1, 3))
        batch = make_batch(forward_only=True)
        scores = await service.accumulate("whole", 0, batch)
        exported = await service.export("whole", 2, tmp_path / "model")
        assert exported.total_bytes > 4 * described.parameters
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        for one, other in zip(scores.logprobs, peft_logprobs(model, batch), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
        await service.stub.DeleteModel(pb.DeleteModelRequest(model_id="whole"))
        assert service.rank_pids == [base]
        assert own != base
        await train(service, "small", range(1, 3))


async def test_several_clients_train_their_models_concurrently(service: TrainingProcess) -> None:
    for model in ("a", "b", "c"):
        await service.create(model, seed=5)
    found = await asyncio.gather(*(train(service, model, range(1, 7)) for model in ("a", "b", "c")))
    for other in found[1:]:
        assert all(equal(*pair) for pair in zip(found[0], other, strict=True))
