"""Real vLLM behind SamplingService, adapters of a tiny model by PEFT, and their answers."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache, PreTrainedModel

from flotilla.rollout.v1 import sampling_service_pb2 as pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as pb_grpc
from flotilla_common.rpc import rpc
from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.stop_tokens import read_eos_ids
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig, SamplersConfig
from flotilla_rollout.sampling.adapters.vllm_samplers import VllmSamplers
from flotilla_rollout.sampling.api.sampling_service import SamplingService
from flotilla_rollout.sampling.samplers import SamplerRoom, Samplers
from flotilla_rollout.sampling.weight_folders import find_model_files, read_shapes
from tests.support.echo_service import TOKEN
from tests.support.tiny_model import load_model

# The largest allowed distance of an engine's float32 logprobs from the model's.
TOLERANCE = 1e-4
PROMPT = np.arange(3, 67, dtype=np.int32)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
WINDOW = 1024
# A random model practically never writes it.
NEVER = "ends only here"
Answering = PreTrainedModel | PeftModel
LIMITS = SamplersConfig(max_samplers=6, max_rank=8, max_active=2)


@dataclass(frozen=True, slots=True)
class ServedSamplers:
    """A running service, a client of it, and its engine."""

    stub: Any
    engine: VllmSamplers
    channel: grpc.aio.Channel


@asynccontextmanager
async def serving_samplers(folder: Path, **options: Any) -> AsyncGenerator[ServedSamplers]:
    """Serve the model in `folder` by an engine with `options` of EngineConfig."""
    policy = PolicyConfig(model=str(folder), dtype="float32", max_model_len=WINDOW)
    model = ServedModel(folder, policy, read_eos_ids(folder))
    config = EngineConfig(device="cpu", max_num_seqs=16, **options)
    engine = await VllmSamplers.start_engine(config, LIMITS, model)
    try:
        shapes = read_shapes(find_model_files(folder))
        room = SamplerRoom(LIMITS.max_samplers, LIMITS.max_rank, LIMITS.max_active, folder, shapes)
        server = rpc.server(token=TOKEN)
        samplers = Samplers(engine, room, engine.limits)
        SamplingService(samplers, policy.model, config.max_num_seqs).add_to(server)
        async with rpc.serving(server, "127.0.0.1:0", grace_s=0.0) as serving:
            channel = rpc.channel(serving.address, token=TOKEN)
            yield ServedSamplers(pb_grpc.SamplingServiceStub(channel), engine, channel)
            await channel.close()
    finally:
        await engine.close()


def make_adapter(
    base: Path, folder: Path, seed: int, *, rank: int = 8, targets: tuple[str, ...] = ATTENTION
) -> PeftModel:
    """Write an adapter that changes the answers, as a trainer does, and return its model."""
    model = load_model(base)
    config = LoraConfig(r=rank, lora_alpha=32, target_modules=list(targets))
    adapted = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(str(folder))
    return adapted  # pyright: ignore[reportReturnType]


def adapter(label: str, folder: Path) -> pb.SamplerWeights:
    return pb.SamplerWeights(label=label, adapter_folder=str(folder))


def whole_model(label: str, folder: Path) -> pb.SamplerWeights:
    return pb.SamplerWeights(label=label, model_folder=str(folder))


def order(sampler_id: str, prompt: NDArray[np.int32] = PROMPT, **fields: Any) -> pb.SampleRequest:
    given: dict[str, Any] = {
        "num_samples": 1,
        "max_tokens": 24,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_strings": [NEVER],
    }
    prompt_ids = prompt.astype("<i4").tobytes()
    return pb.SampleRequest(sampler_id=sampler_id, prompt_ids=prompt_ids, **(given | fields))


def tokens_of(answer: pb.Answer) -> NDArray[np.int32]:
    return np.frombuffer(answer.token_ids, "<i4")


def logprobs_of(answer: pb.Answer) -> NDArray[np.float32]:
    return np.frombuffer(answer.logprobs, "<f4")


def spans_of(answer: pb.Answer) -> list[tuple[str, int]]:
    return [(span.label, span.tokens) for span in answer.spans]


def all_logprobs(
    model: Answering, ids: NDArray[np.int32], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Logprobs of the whole vocabulary after each token, [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor(ids.tolist())[None]).logits[0].float() / temperature
    return torch.log_softmax(logits, -1).numpy()


def answer_error(model: Answering, answer: pb.Answer, temperature: float = 1.0) -> float:
    """Largest distance of an answer's logprobs from the model's."""
    ids = tokens_of(answer)
    table = all_logprobs(model, np.concatenate([PROMPT, ids]), temperature)[len(PROMPT) - 1 : -1]
    return float(np.abs(table[np.arange(len(ids)), ids] - logprobs_of(answer)).max())


def continued_error(first: Any, second: Any, answer: pb.Answer, switch: int) -> float:
    """Largest distance of the logprobs from token `switch` on from those of the second model over
    keys and values that the first has computed."""
    ids = tokens_of(answer)
    whole = torch.tensor([[*PROMPT.tolist(), *ids.tolist()]])
    # The newest token's keys and values are computed with the next one.
    known = len(PROMPT) + switch - 1
    cache = DynamicCache()
    with torch.no_grad():
        first(whole[:, :known], past_key_values=cache, use_cache=True)
        logits = second(whole[:, known:-1], past_key_values=cache, use_cache=True).logits[0]
    table = torch.log_softmax(logits.float(), -1).numpy()
    rest = ids[switch:]
    return float(np.abs(table[np.arange(len(rest)), rest] - logprobs_of(answer)[switch:]).max())
