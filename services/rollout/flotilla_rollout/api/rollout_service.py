"""RolloutService: inspection of a worker, and sampling of one group on request."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, ClassVar

import grpc
import grpc.aio

from flotilla.rollout.v1 import rollout_service_pb2 as pb
from flotilla.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from flotilla_common.domain.attempts import AttemptKey, FailureKind
from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.run_membership import RaisedAlarm
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.text.parsing import ParseError, TextLimits, parse_json
from flotilla_common.wire.policy import encode_policy
from flotilla_rollout.api.service_alarm import list_alarms
from flotilla_rollout.episodes.episode import Attempt, AttemptRunner
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Sampling
from flotilla_rollout.work.burn_in import BurnIn
from flotilla_rollout.work.service_use import ServiceUse
from flotilla_rollout.work.weight_updater import WeightUpdater
from flotilla_rollout.work.worker import Worker

DOMAIN = "rollout.flotilla"
MOST_ATTEMPTS = 64
TASK_LIMITS = TextLimits(bytes=2**21, values=2**16)
HIGHEST_TEMPERATURE = 10.0

Event = pb.SampleGroupResponse


class RolloutService(pb_grpc.RolloutServiceServicer):
    """Service for people; the run itself does not depend on it."""

    # Events of an attempt are kept until they are read.
    MOST_STREAMS: ClassVar = {"/flotilla.rollout.v1.RolloutService/SampleGroup": 16}

    def __init__(
        self,
        worker_id: str,
        worker: Worker,
        follower: WeightUpdater,
        burn_in: BurnIn,
        runner: AttemptRunner,
        policy: Callable[[], PolicyId | None],
        drain: asyncio.Event,
        attempt_timeout_s: float,
        use: ServiceUse | None = None,
    ) -> None:
        """Build the service; `use` is the book of an engine that is a service itself."""
        self._worker_id = worker_id
        self._worker = worker
        self._follower = follower
        self._burn_in = burn_in
        self._runner = runner
        self._policy = policy
        self._drain = drain
        self._budget_s = 2 * attempt_timeout_s
        self._use = use

    @property
    def phase(self) -> str:
        if self._drain.is_set():
            return "draining"
        if self._use is not None and self._use.reason:
            return "waiting"
        if self._follower.updating:
            return "updating"
        if self._policy() is None:
            return "attaching"
        return "sampling" if self._burn_in.over else "burn-in"

    @property
    def alarms(self) -> list[RaisedAlarm]:
        return list_alarms(self._use, loop_time())

    def collect_metrics(self) -> dict[str, float]:
        totals = self._worker.totals
        counted = {
            "attempts": totals.attempts,
            "graded": totals.graded,
            "failed": totals.failed,
            "turns": totals.turns,
            "sampled_tokens": totals.sampled_tokens,
            "leases": totals.leases,
            "lost_leases": totals.lost_leases,
            "running_attempts": self._worker.running_attempts,
            "policy_updates": self._follower.updates,
            "policy_update_seconds": self._follower.last_update_s,
        }
        ends = {f"ended/{reason}": count for reason, count in totals.stop_reasons.items()}
        floats = {name: float(value) for name, value in (counted | ends).items()}
        used = self._use.collect_metrics(loop_time()) if self._use else {}
        return floats | self._burn_in.metrics | used

    async def GetStatus(
        self,
        request: pb.GetStatusRequest,
        context: grpc.aio.ServicerContext,
    ) -> pb.GetStatusResponse:
        policy = self._policy()
        return pb.GetStatusResponse(
            phase=self.phase,
            worker_id=self._worker_id,
            policy=None if policy is None else encode_policy(policy),
            running_attempts=self._worker.running_attempts,
            leases=self._worker.lease_count,
            metrics=self.collect_metrics(),
        )

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        self._drain.set()
        return pb.DrainResponse()

    async def SampleGroup(
        self, request: pb.SampleGroupRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.SampleGroupResponse]:
        count = self._check_request(request)
        group_id = f"sample-{uuid.uuid4().hex[:12]}"
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        task = asyncio.create_task(self._sample_attempts(request, group_id, count, events))
        # Not in a `finally`: a call that is cancelled while it writes leaves this generator
        # suspended until garbage collection.
        on_end: Any = lambda _: task.cancel()  # noqa: E731
        context.add_done_callback(on_end)
        while (event := await events.get()) is not None:
            yield event
        await task

    def _check_request(self, request: pb.SampleGroupRequest) -> int:
        try:
            task = parse_json(request.task_json, TASK_LIMITS)
        except ParseError as error:
            raise _bad_task(f"task_json is not JSON: {error}") from error
        if not isinstance(task, dict):
            raise _bad_task("task_json must be a JSON object")
        if request.attempts > MOST_ATTEMPTS:
            raise _bad_task(f"at most {MOST_ATTEMPTS} attempts, got {request.attempts}")
        if not 0 <= request.temperature <= HIGHEST_TEMPERATURE:
            raise _bad_task(f"temperature must be 0 to {HIGHEST_TEMPERATURE}")
        if self._policy() is None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_POLICY",
                "no weights have been loaded yet; retry when the phase is `sampling`",
                domain=DOMAIN,
            )
        return request.attempts or 1

    async def _sample_attempts(
        self,
        request: pb.SampleGroupRequest,
        group_id: str,
        count: int,
        events: "asyncio.Queue[Event | None]",
    ) -> None:
        """Run the attempts; always end the queue, then raise the first error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(count):
                    attempt = Attempt(
                        key=AttemptKey(group_id, index, 0),
                        task_json=request.task_json,
                        sampling=Sampling(request.temperature, seed=index),
                        opening=count,
                        budget_s=self._budget_s,
                    )
                    tasks.create_task(self._sample_one(attempt, events))
        finally:
            events.put_nowait(None)

    async def _sample_one(self, attempt: Attempt, events: "asyncio.Queue[Event | None]") -> None:
        index = attempt.key.attempt_index

        def observe(kind: str, text: str) -> None:
            events.put_nowait(_make_event(index, kind, text))

        try:
            trajectory = await self._runner.run_attempt(attempt, observe)
        except EngineError as error:
            end = pb.AttemptEnd(reason=FailureKind.ENGINE_ERROR, detail=str(error))
        else:
            end = pb.AttemptEnd(
                reason=trajectory.end_reason, reward=trajectory.reward, detail=trajectory.detail
            )
        events.put_nowait(pb.SampleGroupResponse(attempt_index=index, end=end))


def _make_event(index: int, kind: str, text: str) -> pb.SampleGroupResponse:
    event = pb.SampleGroupResponse(attempt_index=index)
    setattr(event, kind, text)
    return event


def _bad_task(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "BAD_TASK", message, domain=DOMAIN)
