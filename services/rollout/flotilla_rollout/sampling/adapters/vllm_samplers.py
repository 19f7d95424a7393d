"""vLLM as the engine of many samplers: adapters by number, or another whole model."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flotilla_common.files.json_files import read_json_object
from flotilla_common.models.expert_models import count_experts
from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.vllm_answers import sampled_logprobs
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_process import close_llm, start_llm
from flotilla_rollout.adapters.vllm_requests import run_request
from flotilla_rollout.config.rollout import EngineConfig, SamplersConfig
from flotilla_rollout.ports import EngineDead, EngineError, RequestAborted
from flotilla_rollout.sampling.adapters.vllm_params import answer_params, read_report, report_params
from flotilla_rollout.sampling.order_checks import EngineLimits
from flotilla_rollout.sampling.ports import Adopt, UnfitWeights
from flotilla_rollout.sampling.types import (
    EngineAnswer,
    PromptReport,
    RequestWeights,
    SamplingOrder,
)
from flotilla_rollout.sampling.weight_folders import ADAPTER_FILE, find_model_files

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

WORKER = "flotilla_rollout.sampling.adapters.vllm_worker.SamplerLoader"
HEALTH_INTERVAL_S = 0.5


class VllmSamplers:
    """The SamplingEngine port over AsyncLLM."""

    def __init__(self, llm: "AsyncLLM", own_ends: Sequence[int], max_num_seqs: int) -> None:
        self._llm = llm
        self._own_ends = own_ends
        settings = llm.model_config
        vocabulary = settings.get_vocab_size()
        most_topk = settings.max_logprobs if settings.max_logprobs >= 0 else vocabulary
        self.limits = EngineLimits(settings.max_model_len, vocabulary, most_topk)
        # Requests wait here and not in vLLM's queue: there they would keep the salt of weights but
        # could be begun by the next ones.
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._weights_stand = asyncio.Event()
        self._weights_stand.set()
        self._dead: str | None = None
        self._state = 0

    @classmethod
    async def start_engine(
        cls, engine: EngineConfig, samplers: SamplersConfig, model: ServedModel
    ) -> Self:
        """Load the base. Takes seconds to minutes; raises ConfigError and vLLM's errors."""
        _check_experts(engine, samplers, model.folder)
        rank = samplers.max_rank or None
        policy = model.policy.model_copy(update={"adapter_rank": rank, "routing_replay": "off"})
        served = ServedModel(model.folder, policy, model.stop_token_ids)
        more: dict[str, Any] = {"worker_extension_cls": WORKER}
        if rank:
            # vLLM reads a folder again if an adapter has been driven out of the host's memory.
            kept = max(samplers.max_samplers, samplers.max_active)
            more |= {"max_loras": samplers.max_active, "max_cpu_loras": kept}
        llm = await start_llm(engine, served, more)
        if rank:
            await llm.collective_rpc("correct_flotilla_adapters")
        await llm.update_weight_version("0")
        return cls(llm, model.stop_token_ids, engine.max_num_seqs)

    @property
    def state(self) -> int:
        return self._state

    async def add_adapter(self, number: int, folder: Path) -> None:
        await self._stage(number, folder)
        await self._llm.collective_rpc("install_flotilla_adapter")

    async def replace_adapter(self, number: int, folder: Path, adopt: Adopt) -> None:
        await self._stage(number, folder)
        await self._change_weights(
            lambda: self._llm.collective_rpc("install_flotilla_adapter"), adopt
        )

    async def remove_adapter(self, number: int) -> None:
        await self._llm.collective_rpc("remove_flotilla_adapter", args=(number,))

    async def load_model(self, folder: Path, adopt: Adopt) -> None:
        paths = [str(path) for path in find_model_files(folder)]
        await self._change_weights(
            lambda: self._llm.collective_rpc("load_flotilla_model", args=(paths,)), adopt
        )

    @asynccontextmanager
    async def take_slot(self) -> AsyncGenerator[None]:
        async with self._slots:
            # Others may be loaded by the time that a waiting request continues.
            while not self._weights_stand.is_set():
                await self._weights_stand.wait()
            if self._dead is not None:
                raise EngineDead(self._dead)
            yield

    async def sample_answer(
        self, order: SamplingOrder, index: int, weights: RequestWeights
    ) -> EngineAnswer:
        params = answer_params(order, index, self.limits.max_model_len, self._own_ends)
        output = await self._run(order, params, weights)
        answer = output.outputs[0]
        return _check_answer(
            EngineAnswer(
                np.array(answer.token_ids, np.int32),
                sampled_logprobs(answer.logprobs),
                answer.finish_reason == "stop",
                _read_spans(answer.weight_versions),
                output.num_cached_tokens or 0,
            )
        )

    async def score_prompt(
        self, order: SamplingOrder, weights: RequestWeights
    ) -> tuple[PromptReport, int]:
        output = await self._run(order, report_params(order), weights)
        [(state, _)] = _read_spans(output.outputs[0].weight_versions)
        return read_report(output.prompt_logprobs, order.topk), state

    async def wait_until_dead(self) -> str:
        """Return why the engine has ended, once it has."""
        # vLLM reports its death only by this property.
        while self._dead is None and not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(HEALTH_INTERVAL_S)
        return self._dead or "vLLM's engine process has ended"

    async def close(self) -> None:
        await close_llm(self._llm)

    async def _run(
        self, order: SamplingOrder, params: "SamplingParams", weights: RequestWeights
    ) -> "RequestOutput":
        output, _ = await run_request(
            self._llm,
            order.prompt_ids,
            params,
            salt=weights.salt,
            ends=inf,
            adapter=_adapter_request(weights.adapter),
        )
        if output.outputs[0].finish_reason == "abort":
            raise RequestAborted("the engine gave up the request")
        return output

    async def _stage(self, number: int, folder: Path) -> None:
        """Read an adapter into the workers, where nothing uses it yet. Raises UnfitWeights."""
        from vllm.v1.engine.exceptions import EngineDeadError

        args = (number, str(folder), str(folder / ADAPTER_FILE))
        try:
            found = await self._llm.collective_rpc("stage_flotilla_adapter", args=args)
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process has ended") from error
        # vLLM refuses a file by errors of any class, and has changed nothing.
        except Exception as error:
            raise UnfitWeights(f"vLLM cannot read {folder}: {error}") from error
        if unknown := found[0]:
            raise UnfitWeights(f"{folder}: the engine adds no adapter to {', '.join(unknown[:3])}")

    async def _change_weights(self, change: Callable[[], Awaitable[object]], adopt: Adopt) -> None:
        """Change weights while nothing is computed, and begin another state."""
        self._weights_stand.clear()
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            await change()
            await self._llm.update_weight_version(str(self._state + 1))
            self._state += 1
            adopt()
            await self._llm.resume_generation()
        except Exception as error:
            # Layers may be half replaced: this engine must not serve anything.
            self._dead = f"weights could not be loaded: {error!r}"
            raise EngineDead(self._dead) from error
        finally:
            self._weights_stand.set()


def _check_experts(engine: EngineConfig, samplers: SamplersConfig, folder: Path) -> None:
    settings = read_json_object(folder / "config.json")
    if samplers.max_rank and engine.device == "cpu" and all(count_experts(settings)):
        raise ConfigError(
            "rollout.sampling.max_rank: the model has experts, which vLLM with adapters computes on"
            " GPUs only; set it to 0"
        )


def _adapter_request(number: int) -> "LoRARequest | None":
    """Return the adapter field of a request; its path names no file and is never opened."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"sampler-{number}", number, "opened") if number else None


def _read_spans(spans: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(span.version), span.end - span.start) for span in spans or ())


def _check_answer(answer: EngineAnswer) -> EngineAnswer:
    """Raise EngineError unless every token has a finite logprob and weights."""
    tokens, spanned = len(answer.token_ids), sum(count for _, count in answer.spans)
    if not tokens == len(answer.logprobs) == spanned:
        raise EngineError(
            f"vLLM answered with {tokens} tokens, {len(answer.logprobs)} logprobs, weights of"
            f" {spanned}"
        )
    if not np.isfinite(answer.logprobs).all():
        raise EngineError("vLLM answered with a logprob that is no number")
    return answer
