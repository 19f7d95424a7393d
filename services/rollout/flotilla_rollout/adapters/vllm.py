"""vLLM as the engine, in this process's event loop; the model runs in a separate process of vLLM.

CPU and GPU differ only in options. Settings that would otherwise fail silently are made here:
logprobs are those of the sampled distribution (temperature included), the prefix cache is salted by
policy, and weights change only while the scheduler is paused.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.aio.concurrency import running_tasks, wait_for_any
from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.adapters.engine_machines import EngineMachines
from flotilla_rollout.adapters.vllm_adapter_request import load_adapter, make_adapter_request
from flotilla_rollout.adapters.vllm_answers import (
    check_completion,
    sampled_among_candidates,
    sampled_logprobs,
)
from flotilla_rollout.adapters.vllm_experts import EngineExperts
from flotilla_rollout.adapters.vllm_file_copies import file_on_machines
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_pictures import EnginePictures, load_pictures, read_pictures
from flotilla_rollout.adapters.vllm_process import close_llm, start_llm
from flotilla_rollout.adapters.vllm_receiving import WeightTransfers
from flotilla_rollout.adapters.vllm_requests import run_request
from flotilla_rollout.adapters.vllm_sampling import burn_in_params, score_params, turn_params
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import (
    EngineDead,
    EngineError,
    RequestAborted,
    TransportFailed,
    WeightsTorn,
)
from flotilla_rollout.types import (
    OUT_OF_TIME,
    Completion,
    MemoryPeak,
    PolicySpan,
    Publication,
    Sampling,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

HEALTH_INTERVAL_S = 0.5
# No request runs for longer than so many updates.
POLICIES_KEPT = 256
# Starts of a request that newer weights than intended began each time.
MAX_REQUEST_STARTS = 4

log = get_logger(__name__)


class VllmEngine:
    """The Engine port over AsyncLLM."""

    def __init__(
        self,
        llm: "AsyncLLM",
        stop_token_ids: Sequence[int],
        *,
        seeded: bool,
        max_num_seqs: int,
        experts: EngineExperts | None = None,
        adapted: bool = False,
        machines: EngineMachines | None = None,
        pictures: EnginePictures | None = None,
    ) -> None:
        """Build the engine; with `experts` it reports the ones that the model chose, and if
        `adapted` it receives adapters only. With `machines` its workers are on several. Without
        `pictures` it is shown none."""
        self._llm = llm
        self._transfers = WeightTransfers(llm)
        self._experts = experts
        self._adapter = make_adapter_request() if adapted else None
        self._machines = machines
        self._pictures = pictures
        # Requests wait here and not in vLLM's queue: there they would keep a policy's salt but
        # could be begun by the next one's weights.
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._weights_stand = asyncio.Event()
        self._weights_stand.set()
        self._stop = list(stop_token_ids)
        self._seeded = seeded
        self._policies: BoundedDict[str, PolicyId] = BoundedDict(POLICIES_KEPT)
        self._dead: str | None = None
        self.policy: PolicyId | None = None

    @classmethod
    async def start_engine(
        cls,
        config: EngineConfig,
        model: ServedModel,
        index: int = 0,
        machines: EngineMachines | None = None,
    ) -> Self:
        """Load the model into one engine, the `index`th of its replica, on the joined `machines` or
        on this one.

        Takes seconds to minutes; raises vLLM's errors."""
        llm = await start_llm(config, model, index=index, machines=machines)
        experts = None
        if model.policy.routing_replay != "off":
            experts = EngineExperts(llm, config.device)
            await experts.start_recording(config.max_num_seqs)
        return cls(
            llm,
            model.stop_token_ids,
            seeded=config.seeded,
            max_num_seqs=config.max_num_seqs,
            experts=experts,
            adapted=model.policy.adapter_rank is not None,
            machines=machines,
            pictures=load_pictures(llm, model),
        )

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        params = self._make_params(sampling, len(token_ids), max_tokens)
        ends = loop_time() + timeout_s
        for _ in range(MAX_REQUEST_STARTS):
            try:
                policy, answer, over = await self._run_in_slot(
                    token_ids, params, ends, pictures=pictures
                )
            except TimeoutError:
                return OUT_OF_TIME
            completion = self._make_completion(answer.outputs[0], over=over, top_k=sampling.top_k)
            if self._experts is not None:
                experts = await self._experts.take_experts(answer, sampling)
                completion = replace(completion, experts=experts)
            if not completion.spans or completion.spans[0].policy == policy:
                return completion
            log.debug("begun by other weights than requested", policy=policy.label)
            if completion.timed_out:
                return OUT_OF_TIME
        raise RequestAborted(f"the weights changed {MAX_REQUEST_STARTS} times before it was begun")

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        shown = await read_pictures(self._pictures, pictures)
        policy = await self._wait_for_policy()
        scored, _ = await run_request(
            self._llm,
            token_ids,
            score_params(),
            salt=policy.label,
            ends=inf,
            adapter=self._adapter,
            shown=shown,
        )
        # Nothing comes before the first token.
        return sampled_logprobs(scored.prompt_logprobs)[1:]

    async def burn_in(
        self,
        token_ids: NDArray[np.int32],
        max_tokens: int,
        timeout_s: float,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        params = burn_in_params(max_tokens, seeded=self._seeded)
        ends = loop_time() + timeout_s
        # A unique salt: no request has computed this prefix, and none will find it.
        salt = f"burn-in {uuid.uuid4().hex}"
        try:
            _, answer, over = await self._run_in_slot(token_ids, params, ends, salt, pictures)
        except TimeoutError:
            return OUT_OF_TIME
        return self._make_completion(answer.outputs[0], over=over)

    async def measure_memory(self) -> Sequence[MemoryPeak]:
        return [
            MemoryPeak(*found)
            for found in await self._llm.collective_rpc("measure_flotilla_memory")
        ]

    async def identify_devices(self) -> Sequence[str]:
        return await self._llm.collective_rpc("identify_flotilla_device")

    async def load_weights(self, publication: Publication, path: Path) -> None:
        rows = [
            (entry.name, entry.dtype, list(entry.shape), entry.offset_bytes)
            for entry in publication.manifest
        ]
        args = (str(path), publication.total_bytes, rows)

        async def change() -> None:
            async with file_on_machines(self._llm, publication, path, self._machines):
                if self._adapter is not None:
                    await load_adapter(self._llm, *args)
                else:
                    await self._llm.collective_rpc("load_flotilla_weights", args=args)

        await self._finish_in_time(publication, self._change_weights(publication, change))

    async def receive_weights(self, publication: Publication) -> None:
        async def receive() -> None:
            await self._transfers.open_group(publication)
            await self._change_weights(
                publication, lambda: self._transfers.receive_weights(publication)
            )

        await self._finish_in_time(publication, receive())

    async def wait_until_dead(self) -> str:
        # vLLM reports its death only by this property.
        while self._dead is None and not self._llm.errored and not self._lost_machine:  # noqa: ASYNC110
            await asyncio.sleep(HEALTH_INTERVAL_S)
        reason = self._dead or self._lost_machine or "vLLM's engine process has ended"
        return reason if self._machines is None else await self._machines.explain_death(reason)

    @property
    def _lost_machine(self) -> str | None:
        return self._machines.lost if self._machines is not None else None

    async def close(self) -> None:
        if self._pictures is not None:
            self._pictures.close()
        await close_llm(self._llm)

    async def _finish_in_time(
        self, publication: Publication, update: Coroutine[Any, Any, None]
    ) -> None:
        """Run an update until it or the engine ends, or the publication's time is over.

        vLLM never answers calls to a process that was killed or hangs. Raises EngineDead then, and
        the update's own errors."""
        async with running_tasks(update, self.wait_until_dead()) as (updating, dying):
            await wait_for_any((updating, dying), publication.timeout_s)
            if updating.done():
                updating.result()
                return
            reason = dying.result() if dying.done() else None
        raise self._end_serving(
            reason
            or f"the update to policy {publication.policy.label} has not ended after"
            f" {publication.timeout_s:g} s (learner.publish_timeout_s)"
        )

    async def _change_weights(
        self, publication: Publication, change: Callable[[], Awaitable[object]]
    ) -> None:
        """Change the weights while nothing is computed, and serve them.

        Raises TransportFailed, with the old ones still served; WeightsTorn, with nothing served
        until others are loaded; EngineDead."""
        label = publication.policy.label
        self._weights_stand.clear()
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            await change()
            await self._llm.update_weight_version(label)
            if self._pictures is not None:
                await self._pictures.forget_features(reloaded=publication.reload)
            if publication.reload:
                # The same salt covers prefixes that untrusted weights have computed.
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            self._remember_policy(publication.policy)
            await self._llm.resume_generation()
        except WeightsTorn:
            self.policy = None
            raise
        except TransportFailed:
            if self.policy is not None:
                await self._llm.resume_generation()
                self._weights_stand.set()
            raise
        except Exception as error:
            # After any failure the layers may be half replaced: this engine must not serve
            # anything, and resuming would.
            reason = f"weights of policy {label} could not be loaded: {error!r}"
            raise self._end_serving(reason) from error
        self._weights_stand.set()

    def _end_serving(self, reason: str) -> EngineDead:
        """Serve nothing from now on; return the error to raise."""
        self._dead = reason
        self.policy = None
        self._weights_stand.set()
        return EngineDead(reason)

    def _remember_policy(self, policy: PolicyId) -> None:
        """Answer requests by `policy` from now on; running ones name older policies too."""
        self._policies[policy.label] = policy
        self.policy = policy
        if self._pictures is not None:
            self._pictures.served = policy.label

    async def _run_in_slot(
        self,
        token_ids: NDArray[np.int32],
        params: "SamplingParams",
        ends: float,
        salt: str = "",
        pictures: Sequence[ShownPicture] = (),
    ) -> tuple[PolicyId, "RequestOutput", bool]:
        """Run a request in a slot; return the policy that it was submitted to, the answer, and
        whether it was cut at `ends`. The policy's prefix cache is used unless `salt` names another.
        Raises TimeoutError if there is no slot by `ends`."""
        # Not in the slot, which others can use meanwhile.
        shown = await read_pictures(self._pictures, pictures)
        policy = await self._take_slot(ends)
        try:
            answer, over = await run_request(
                self._llm,
                token_ids,
                params,
                salt=salt or policy.label,
                ends=ends,
                adapter=self._adapter,
                shown=shown,
            )
        finally:
            self._slots.release()
        return policy, answer, over

    async def _take_slot(self, ends: float) -> PolicyId:
        """Take a slot among the running requests, which the caller releases; return the policy
        whose prefix cache to use.

        If weights change between the queueing and the start of a request, the new ones start it on
        a prefix that the older ones computed, and the result belongs to neither policy. Raises
        TimeoutError if no slot or policy is available by `ends`."""
        waits = self._slots.locked() or not self._weights_stand.is_set()
        # Most requests do not wait, and need no timer.
        async with asyncio.timeout_at(ends) if waits else nullcontext():
            await self._slots.acquire()
            try:
                return await self._wait_for_policy()
            except BaseException:
                self._slots.release()
                raise

    async def _wait_for_policy(self) -> PolicyId:
        """Return the served policy, once no weights are being loaded."""
        await self._weights_stand.wait()
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self.policy is None:
            raise EngineError("no policy is loaded")
        return self.policy

    def _make_completion(
        self, output: "CompletionOutput", *, over: bool, top_k: int = 0
    ) -> Completion:
        """Build a completion; with `over` its time is over, so an abort is ours."""
        aborted = output.finish_reason == "abort"
        if aborted and not over:
            raise RequestAborted("the engine gave up the request")
        logprobs, candidates, mended = (
            sampled_among_candidates(output.logprobs, top_k)
            if top_k
            else (sampled_logprobs(output.logprobs), None, 0)
        )
        return check_completion(
            Completion(
                token_ids=np.array(output.token_ids, np.int32),
                logprobs=logprobs,
                spans=self._make_spans(output),
                cut=output.finish_reason == "length",
                timed_out=aborted,
                candidates=candidates,
                mended=mended,
            )
        )

    def _make_params(self, sampling: Sampling, length: int, max_tokens: int) -> "SamplingParams":
        more = self._experts.request_fields(sampling) if self._experts is not None else {}
        return turn_params(sampling, length, max_tokens, self._stop, seeded=self._seeded, more=more)

    def _make_spans(self, output: "CompletionOutput") -> tuple[PolicySpan, ...]:
        spans = output.weight_versions or []
        return tuple(
            PolicySpan(self._policies[span.version], span.end - span.start) for span in spans
        )
