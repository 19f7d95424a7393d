"""Requests to vLLM with a time limit."""

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_rollout.ports import EngineDead, EngineError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from flotilla_rollout.adapters.vllm_pictures import RequestPictures

ABORT_INTERVAL_S = 0.05


async def run_request(
    llm: "AsyncLLM",
    token_ids: NDArray[np.int32],
    params: Any,
    *,
    salt: str,
    ends: float,
    adapter: "LoRARequest | None" = None,
    shown: "RequestPictures | None" = None,
) -> tuple["RequestOutput", bool]:
    """Return the answer, cut at `ends` if necessary, and whether it was cut.

    `salt` separates the prefix caches of policies. Raises EngineError."""
    # Another time if vLLM's core has lost pictures that it was thought to hold.
    for _ in range(1 if shown is None else 2):
        features = {} if shown is None else await shown.make_features(token_ids)
        prompt = {"prompt_token_ids": token_ids.tolist(), "cache_salt": salt, **features}
        answer, over = await _run_prompt(llm, prompt, params, ends, adapter)
        if answer.outputs[0].finish_reason != "error":
            return answer, over
    raise EngineError("vLLM has ended the request by an error of its own")


async def _run_prompt(
    llm: "AsyncLLM", prompt: Any, params: Any, ends: float, adapter: "LoRARequest | None"
) -> tuple["RequestOutput", bool]:
    from vllm.exceptions import VLLMError
    from vllm.v1.engine.exceptions import EngineDeadError

    request_id = uuid.uuid4().hex
    last: RequestOutput | None = None
    aborts: list[asyncio.Task[None]] = []

    def begin_abort() -> None:
        aborts.append(asyncio.create_task(_keep_aborting(llm, request_id)))

    timer = asyncio.get_running_loop().call_at(ends, begin_abort)
    try:
        answers = llm.generate(prompt, params, request_id=request_id, lora_request=adapter)
        async for output in answers:
            last = output
    except EngineDeadError as error:
        raise EngineDead("vLLM's engine process has ended") from error
    except VLLMError as error:
        raise EngineError(f"{type(error).__name__}: {error}") from error
    finally:
        timer.cancel()
        await cancel_tasks(aborts)
    if last is None:
        raise EngineError("vLLM ended the request without an output")
    return last, bool(aborts)


async def _keep_aborting(llm: "AsyncLLM", request_id: str) -> None:
    """Abort a request in vLLM, which then answers with the tokens sampled so far."""
    # vLLM may not know the request yet, and then ignores the abort.
    while True:
        await llm.abort(request_id)
        await asyncio.sleep(ABORT_INTERVAL_S)
