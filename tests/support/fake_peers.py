"""A learner and a gateway on real sockets that a test controls."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import xxhash

from flotilla.env_gateway.v1 import episode_service_pb2 as env_pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc as env_grpc
from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import group_service_pb2_grpc as group_grpc
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla.learner.v1 import policy_service_pb2_grpc as policy_grpc
from flotilla.learner.v1 import trajectory_pb2, weight_service_pb2
from flotilla.learner.v1 import weight_service_pb2_grpc as weight_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError

TOKEN = "rollout-test-token-0123456789"
Context = grpc.aio.ServicerContext
Answer = Callable[[env_pb.CallToolRequest], env_pb.CallToolResponse]


def refuse(code: grpc.StatusCode, reason: str, **metadata: str) -> ServiceError:
    return ServiceError(code, reason, "a test wants it so", domain="test", metadata=metadata)


def unavailable() -> ServiceError:
    return refuse(grpc.StatusCode.UNAVAILABLE, "DRAINING")


def unused() -> ServiceError:
    return refuse(grpc.StatusCode.UNIMPLEMENTED, "UNUSED")


@dataclass
class Submitted:
    """One submission as it arrived."""

    header: trajectory_pb2.TrajectoryHeader
    token_ids: bytes
    logprobs: bytes
    digest: bytes

    @property
    def key(self) -> tuple[int, int]:
        return self.header.key.attempt_index, getattr(self.header.key, "try")


@dataclass
class FakeLearner(group_grpc.GroupServiceServicer, policy_grpc.PolicyServiceServicer):
    """Hands out `leases`, keeps what comes back; fails the first calls of a kind on request."""

    leases: list[group_pb.Lease] = field(default_factory=list[group_pb.Lease])
    updates: "asyncio.Queue[policy_pb.Update | None]" = field(default_factory=asyncio.Queue)
    run_epoch: int = 1
    fail: dict[str, int] = field(default_factory=dict[str, int])
    lost: set[str] = field(default_factory=set[str])
    submitted: list[Submitted] = field(default_factory=list[Submitted])
    renewed: list[list[str]] = field(default_factory=list[list[str]])
    released: list[str] = field(default_factory=list[str])
    polls: list[group_pb.LeaseGroupRequest] = field(
        default_factory=list[group_pb.LeaseGroupRequest]
    )
    attached: list[policy_pb.AttachRequest] = field(default_factory=list[policy_pb.AttachRequest])
    reports: list[policy_pb.ReportPolicyRequest] = field(
        default_factory=list[policy_pb.ReportPolicyRequest]
    )
    accept: bool = True
    # The number of next submissions with a reward that are refused.
    malformed: int = 0
    # The number of submissions that are ended as if stalled.
    stalled: int = 0
    # The delay of an answer to a poll after the lease is granted.
    answer_seconds: float = 0.0
    granted: dict[str, group_pb.Lease] = field(default_factory=dict[str, group_pb.Lease])

    def _enter(self, method: str, context: Context) -> None:
        if self.fail.get(method, 0) > 0:
            self.fail[method] -= 1
            raise unavailable()
        reported = dict(context.invocation_metadata() or ()).get("flotilla-run-epoch")
        if reported is not None and reported != str(self.run_epoch):
            raise refuse(
                grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", run_epoch=str(self.run_epoch)
            )

    async def LeaseGroup(self, request: Any, context: Any) -> group_pb.LeaseGroupResponse:
        self._enter("LeaseGroup", context)
        self.polls.append(request)
        await asyncio.sleep(0.02)
        if self.leases and request.free_attempts and request.request_id not in self.granted:
            self.granted[request.request_id] = self.leases.pop(0)
        lease = self.granted.get(request.request_id)
        await asyncio.sleep(self.answer_seconds if request.free_attempts else 0.0)
        return group_pb.LeaseGroupResponse(lease=lease, run_epoch=self.run_epoch)

    async def RenewLeases(self, request: Any, context: Any) -> group_pb.RenewLeasesResponse:
        self._enter("RenewLeases", context)
        self.renewed.append(list(request.lease_ids))
        lost = [lease_id for lease_id in request.lease_ids if lease_id in self.lost]
        return group_pb.RenewLeasesResponse(lost_lease_ids=lost)

    async def ReleaseLeases(self, request: Any, context: Any) -> group_pb.ReleaseLeasesResponse:
        self._enter("ReleaseLeases", context)
        self.released += request.lease_ids
        return group_pb.ReleaseLeasesResponse()

    async def SubmitTrajectory(
        self, request_iterator: AsyncIterator[group_pb.SubmitTrajectoryRequest], context: Any
    ) -> group_pb.SubmitTrajectoryResponse:
        self._enter("SubmitTrajectory", context)
        if self.stalled:
            self.stalled -= 1
            raise refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "STREAM_STALLED")
        parts = [part async for part in request_iterator]
        chunks = [part.chunk for part in parts[1:]]
        ids = b"".join(chunk.token_ids for chunk in chunks)
        scores = b"".join(chunk.logprobs for chunk in chunks)
        header = parts[0].header
        assert header.content_digest == xxhash.xxh3_128(ids + scores).digest()
        if header.lease_id in self.lost:
            raise refuse(grpc.StatusCode.NOT_FOUND, "LEASE_LOST")
        if self.malformed:
            self.malformed -= 1
            raise refuse(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_TRAJECTORY")
        self.submitted.append(Submitted(header, ids, scores, header.content_digest))
        # Drop the whole group, like the learner.
        over = header.failure in (
            trajectory_pb2.FAILURE_KIND_TEMPLATE_ERROR,
            trajectory_pb2.FAILURE_KIND_REFUSED_BY_LEARNER,
        )
        return group_pb.SubmitTrajectoryResponse(group_complete=over)

    async def Attach(self, request: Any, context: Any) -> AsyncGenerator[policy_pb.AttachResponse]:
        self.attached.append(request)
        while (update := await self.updates.get()) is not None:
            yield policy_pb.AttachResponse(update=update, run_epoch=self.run_epoch)
        raise unavailable()

    async def GetStatus(self, request: Any, context: Any) -> group_pb.GetStatusResponse:
        raise unused()

    async def Drain(self, request: Any, context: Any) -> group_pb.DrainResponse:
        raise unused()

    async def ReportPolicy(self, request: Any, context: Any) -> policy_pb.ReportPolicyResponse:
        self._enter("ReportPolicy", context)
        self.reports.append(request)
        return policy_pb.ReportPolicyResponse(accepted=self.accept)


@dataclass
class FakeGateway(env_grpc.EpisodeServiceServicer):
    """Opens episodes that answer with `answer`; remembers the open ones."""

    answer: Answer = lambda request: ok('{"found": 1}')
    seconds: float = 0.0
    reward: float | None = 1.0
    fail: dict[str, int] = field(default_factory=dict[str, int])
    refuse_open: ServiceError | None = None
    open_failures: int = 0
    lost: set[str] = field(default_factory=set[str])
    opened: list[env_pb.OpenEpisodeRequest] = field(default_factory=list[env_pb.OpenEpisodeRequest])
    calls: list[env_pb.CallToolRequest] = field(default_factory=list[env_pb.CallToolRequest])
    grades: list[str] = field(default_factory=list[str])
    renewed: list[list[str]] = field(default_factory=list[list[str]])
    open_now: set[str] = field(default_factory=set[str])
    close_seconds: float = 0.0
    media: bytes = b""
    shown: list[env_pb.ContentPart] = field(default_factory=list[env_pb.ContentPart])
    refuse_grade: ServiceError | None = None

    def _enter(self, method: str) -> None:
        if self.fail.get(method, 0) > 0:
            self.fail[method] -= 1
            raise unavailable()

    async def OpenEpisode(
        self, request: Any, context: Any
    ) -> AsyncGenerator[env_pb.OpenEpisodeResponse]:
        self._enter("OpenEpisode")
        if self.refuse_open is not None:
            raise self.refuse_open
        self.opened.append(request)
        episode_id = f"e{len(self.opened)}"
        yield env_pb.OpenEpisodeResponse(
            state=env_pb.EPISODE_STATE_PROVISIONING, episode_id=episode_id
        )
        if self.open_failures > 0:
            self.open_failures -= 1
            yield env_pb.OpenEpisodeResponse(
                state=env_pb.EPISODE_STATE_FAILED, episode_id=episode_id, detail="no instance"
            )
            return
        self.open_now.add(episode_id)
        ready = _ready()
        ready.initial_observation.extend(self.shown)
        yield env_pb.OpenEpisodeResponse(
            state=env_pb.EPISODE_STATE_READY, episode_id=episode_id, ready=ready
        )

    async def CallTool(self, request: Any, context: Any) -> env_pb.CallToolResponse:
        self._enter("CallTool")
        if request.episode_id in self.lost:
            raise refuse(grpc.StatusCode.NOT_FOUND, "EPISODE_LOST")
        self.calls.append(request)
        await asyncio.sleep(self.seconds)
        return self.answer(request)

    async def Grade(
        self, request_iterator: AsyncIterator[env_pb.GradeRequest], context: Any
    ) -> env_pb.GradeResponse:
        self._enter("Grade")
        if self.refuse_grade is not None:
            raise self.refuse_grade
        parts = [part async for part in request_iterator]
        self.grades.append(parts[0].header.episode_id)
        if self.reward is None:
            reason = env_pb.NO_GRADE_REASON_EXECUTION_FAILED
            return env_pb.GradeResponse(no_grade=env_pb.NoGrade(reason=reason, detail="boom"))
        return env_pb.GradeResponse(reward=self.reward)

    async def RenewEpisodes(self, request: Any, context: Any) -> env_pb.RenewEpisodesResponse:
        self.renewed.append(list(request.episode_ids))
        lost = [each for each in request.episode_ids if each in self.lost]
        return env_pb.RenewEpisodesResponse(lost_episode_ids=lost)

    async def FetchMedia(
        self, request: Any, context: Any
    ) -> AsyncGenerator[env_pb.FetchMediaResponse]:
        for start in range(0, len(self.media), 2**16):
            yield env_pb.FetchMediaResponse(chunk=self.media[start : start + 2**16])

    async def WatchCapacity(
        self, request: Any, context: Any
    ) -> AsyncGenerator[env_pb.WatchCapacityResponse]:
        raise unused()
        yield

    async def GetStatus(self, request: Any, context: Any) -> env_pb.GetStatusResponse:
        raise unused()

    async def Drain(self, request: Any, context: Any) -> env_pb.DrainResponse:
        raise unused()

    async def CloseEpisode(self, request: Any, context: Any) -> env_pb.CloseEpisodeResponse:
        await asyncio.sleep(self.close_seconds)
        self.open_now.discard(request.episode_id)
        return env_pb.CloseEpisodeResponse()


def ok(text: str) -> env_pb.CallToolResponse:
    part = env_pb.ContentPart(text=text)
    return env_pb.CallToolResponse(outcome=env_pb.TOOL_OUTCOME_OK, parts=[part])


def _ready() -> env_pb.EpisodeReady:
    tool = env_pb.Tool(name="look", input_schema_json='{"type": "object", "properties": {}}')
    return env_pb.EpisodeReady(
        tools=[tool],
        facts=env_pb.PromptFacts(prompt="Find it.", current_date="2025-03-01"),
        instance_id="instance",
        lease_ttl=rpc.to_duration(30.0),
        deadline=rpc.to_duration(60.0),
    )


class FakeWeights(weight_grpc.WeightServiceServicer):
    """Streams `data`, and breaks off after `cut_after` bytes of each stream but the last."""

    def __init__(self, data: bytes, cut_after: int, cuts: int) -> None:
        self._data = data
        self._cut_after = cut_after
        self.cuts = cuts
        self.offsets: list[int] = []
        # The version that each caller reports as held.
        self.held: list[int | None] = []

    async def FetchWeights(
        self, request: Any, context: Any
    ) -> AsyncGenerator[weight_service_pb2.FetchWeightsResponse]:
        self.offsets.append(request.offset_bytes)
        self.held.append(request.held.version if request.HasField("held") else None)
        end = len(self._data)
        if self.cuts > 0:
            self.cuts -= 1
            end = min(end, request.offset_bytes + self._cut_after)
        for start in range(request.offset_bytes, end, 1000):
            chunk = self._data[start : min(start + 1000, end)]
            yield weight_service_pb2.FetchWeightsResponse(chunk=chunk, offset_bytes=start)
        if end < len(self._data):
            raise unavailable()


def lease(lease_id: str = "l1", attempts: int = 2, **changes: Any) -> group_pb.Lease:
    fields: dict[str, Any] = {
        "lease_id": lease_id,
        "group_id": f"group-{lease_id}",
        "task_json": '{"key": "task", "env_id": "shop"}',
        "attempts": [
            group_pb.LeasedAttempt(attempt_index=index, next_try=0, seed=index)
            for index in range(attempts)
        ],
        "purpose": group_pb.PURPOSE_TRAIN,
        "sampling": group_pb.SamplingParameters(temperature=1.0),
        "group_deadline": rpc.to_duration(20.0),
        "lease_ttl": rpc.to_duration(0.6),
        "max_tries": 3,
        "run_epoch": 1,
    }
    return group_pb.Lease(**(fields | changes))


@asynccontextmanager
async def served(
    add: Callable[[grpc.aio.Server], None], listen: str = "127.0.0.1:0"
) -> AsyncGenerator[str]:
    """Run a server with the services that `add` adds; yield its address."""
    server = rpc.server(token=TOKEN)
    add(server)
    async with rpc.serving(server, listen, grace_s=0.0) as serving:
        serving.set_serving(True)
        yield serving.address
