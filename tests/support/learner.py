"""A learner with fake ranks, and a rollout worker that makes up its trajectories."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import grpc
import grpc.aio
import numpy as np
import xxhash

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import (
    group_service_pb2_grpc,
    policy_pb2,
    policy_service_pb2,
    policy_service_pb2_grpc,
    trajectory_pb2,
)
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.process.host_identity import host_digest
from flotilla_common.process.runtime import Runtime
from flotilla_common.rpc import rpc
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.alarms.adapters.jsonl_sink import JsonlAlarmSink
from flotilla_learner.app import run_learner
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.dumps.run_dumps import Dumps
from flotilla_learner.judge.group_judge import GroupJudge
from flotilla_learner.ports import HintRenderer, Ranks, RemoteStore, Teacher
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from tests.support.call_metadata import with_metadata
from tests.support.fake_ranks import FakeRanks

if TYPE_CHECKING:
    from flotilla.learner.v1.group_service_pb2_grpc import GroupServiceAsyncStub
    from flotilla.learner.v1.policy_service_pb2_grpc import PolicyServiceAsyncStub

TOKEN = "0123456789abcdef"
TOKENIZER = b"t" * 32


def write_tasks(path: Path, count: int = 12, *, envs: int = 3, prefix: str = "task") -> Path:
    tasks = [
        {"key": f"{prefix}-{n}", "prompt": f"do {prefix} {n}", "env_id": f"env{n % envs}"}
        for n in range(count)
    ]
    path.write_text(json.dumps({"tasks": tasks}))
    return path


def make_config(tmp_path: Path, **changes: Any) -> LearnerConfig:
    tasks = write_tasks(tmp_path / "tasks.json")
    values: dict[str, Any] = {
        "tasks": str(tasks),
        "steps": 3,
        "groups_per_step": 3,
        "group_size": 2,
        "lease_ttl_s": 2.0,
        "attach_grace_s": 0.2,
        **changes,
    }
    return parse_config(LearnerConfig, values, where="test")


def make_runtime(
    tmp_path: Path,
    config: LearnerConfig,
    *,
    listen: str,
    run_id: str = "run",
    sees_pictures: bool = False,
    judged: Sequence[str] = (),
) -> Runtime[LearnerConfig]:
    policy: dict[str, Any] = {"model": "m", "dtype": "float32", "max_model_len": 128}
    if sees_pictures:
        policy["vision"] = {}
    shared = {"name": "test", "policy": policy}
    environments = {env: {"grading": "judge"} for env in judged}
    return Runtime(
        service="learner",
        config=config,
        shared=parse_config(SharedConfig, shared, where="test"),
        spec={**shared, "env_gateway": {"environments": environments}},
        run_id=run_id,
        run_dir=tmp_path / "run",
        token=TOKEN,
        peers=None,  # pyright: ignore[reportArgumentType]
        listen=listen,
    )


@dataclass
class RunningLearner:
    """A learner in this process, on a real socket."""

    address: str
    runtime: Runtime[LearnerConfig]
    task: asyncio.Task[None]


@asynccontextmanager
async def learner(
    tmp_path: Path,
    config: LearnerConfig,
    ranks: Ranks | None = None,
    store: RemoteStore | None = None,
    tokenizer: TokenizerDigests | None = None,
    export: Callable[[Path, Path], None] | None = None,
    weight_server: str | None = None,
    dumps: Dumps | None = None,
    run_id: str = "run",
    vision: VisionFamily | None = None,
    *,
    sees_pictures: bool = False,
    teacher: Teacher | None = None,
    hints: HintRenderer | None = None,
    judge: GroupJudge | None = None,
    judged: Sequence[str] = (),
) -> AsyncGenerator[RunningLearner]:
    address = free_address()
    facts: dict[str, Any] = {"run_id": run_id, "sees_pictures": sees_pictures, "judged": judged}
    runtime = make_runtime(tmp_path, config, listen=address, **facts)
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    ranks = ranks or FakeRanks(tmp_path / "weights")
    vendors = LearnerDependencies(
        *(ranks, tracker, tokenizer or TokenizerDigests(TOKENIZER)),
        weight_server=weight_server,
        store=store,
        alarm_sinks=[JsonlAlarmSink(tmp_path / "run" / "alarms.jsonl", run_id)],
        export=export,
        dumps=dumps or Dumps(),
        vision=vision,
        teacher=teacher,
        hints=hints,
        judge=judge,
    )
    task = asyncio.create_task(run_learner(runtime, vendors))
    try:
        yield RunningLearner(address, runtime, task)
    finally:
        task.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await task
        finally:
            tracker.close()


@dataclass
class Submission:
    """Header and arrays of one try."""

    header: trajectory_pb2.TrajectoryHeader
    token_ids: list[bytes] = field(default_factory=list[bytes])
    logprobs: list[bytes] = field(default_factory=list[bytes])
    digest: bytes | None = None
    # Files of the header's pictures.
    pictures: list[bytes] = field(default_factory=list[bytes])

    @property
    def content_digest(self) -> bytes:
        # A spoiled header may have other sequences than there are arrays.
        headers = zip_longest(self.header.sequences[: len(self.token_ids)], self.token_ids)
        shown = [
            b"".join(m.sha256 for m in each.media if "image/" in m.mime) if each else b""
            for each, _ in headers
        ]
        arrays = zip(self.token_ids, self.logprobs, shown, strict=True)
        return xxhash.xxh3_128_digest(b"".join(chain.from_iterable(arrays)))

    async def parts(self) -> AsyncIterator[pb.SubmitTrajectoryRequest]:
        request = pb.SubmitTrajectoryRequest(header=self.header)
        request.header.content_digest = self.digest or self.content_digest
        yield request
        for index, data in enumerate(self.pictures):
            for start in range(0, len(data), 512):
                picture = trajectory_pb2.PictureChunk(
                    picture_index=index, data=data[start : start + 512]
                )
                yield pb.SubmitTrajectoryRequest(picture=picture)
        for index, (ids, scores) in enumerate(zip(self.token_ids, self.logprobs, strict=True)):
            chunk = trajectory_pb2.SequenceChunk(
                sequence_index=index, token_ids=ids, logprobs=scores
            )
            yield pb.SubmitTrajectoryRequest(chunk=chunk)


def key(group_id: str, index: int, attempt_try: int = 0) -> trajectory_pb2.TrajectoryKey:
    message = trajectory_pb2.TrajectoryKey(group_id=group_id, attempt_index=index)
    setattr(message, "try", attempt_try)
    return message


def graded(
    lease: pb.Lease,
    attempt: pb.LeasedAttempt,
    policy: policy_pb2.PolicyId,
    *,
    reward: float | None = None,
) -> Submission:
    """Two prompt tokens, three by the policy, one observation, two by the policy."""
    task = json.loads(lease.task_json)
    chooser = random.Random(attempt.seed)
    spans = trajectory_pb2.Spans(
        authors=[
            trajectory_pb2.AUTHOR_PROMPT,
            trajectory_pb2.AUTHOR_POLICY,
            trajectory_pb2.AUTHOR_ENVIRONMENT,
            trajectory_pb2.AUTHOR_POLICY,
        ],
        lengths=[2, 3, 1, 2],
        writer_indexes=[0, 0],
        writers=[trajectory_pb2.Writer(policy=policy, temperature=lease.sampling.temperature)],
    )
    header = trajectory_pb2.TrajectoryHeader(
        key=key(lease.group_id, attempt.attempt_index, attempt.next_try),
        lease_id=lease.lease_id,
        worker_id="w0",
        sequences=[trajectory_pb2.SequenceHeader(token_count=8, spans=spans)],
        reward=float(chooser.random() < 0.5) if reward is None else reward,
        stop_reason=trajectory_pb2.STOP_REASON_DONE,
        counts=trajectory_pb2.TrajectoryCounts(turns=2, tool_calls=2),
        env_key=task["env_id"],
        task_key=task["key"],
    )
    token_ids = np.array([chooser.randrange(64) for _ in range(8)], dtype="<i4").tobytes()
    logprobs = np.array([-chooser.random() for _ in range(5)], dtype="<f4").tobytes()
    return Submission(header, [token_ids], [logprobs])


def make_turns(count: int) -> trajectory_pb2.Turns:
    return trajectory_pb2.Turns(
        generate_s=[0.5] * count,
        tools_s=[0.25] * count,
        prompt_tokens=[2**31] * count,
        generated_tokens=[1] * count,
        thinking_tokens=[0] * count,
    )


def failed(
    lease: pb.Lease, attempt: pb.LeasedAttempt, kind: trajectory_pb2.FailureKind.ValueType
) -> Submission:
    header = trajectory_pb2.TrajectoryHeader(
        key=key(lease.group_id, attempt.attempt_index, attempt.next_try),
        lease_id=lease.lease_id,
        failure=kind,
    )
    return Submission(header)


class FakeWorker:
    """Leases, plays and submits until it is stopped; takes every update at once."""

    # The logprob that its engine returns for every token of a canary; -1 is right.
    canary = -1.0
    # The logprob of each token that it samples for a probe; None answers no probe.
    probed: float | None = None

    def __init__(
        self,
        address: str,
        worker_id: str = "w0",
        *,
        delay_s: float = 0.0,
        report_delay_s: float = 0.0,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """`channel` replaces one to `address`."""
        self.worker_id = worker_id
        self.incarnation = uuid4().hex
        self.policy = policy_pb2.PolicyId()
        self.run_epoch: int | None = None
        self.receipts: dict[tuple[str, int, int], bytes] = {}
        self.updates: list[policy_service_pb2.Update] = []
        self._delay_s = delay_s
        self._report_delay_s = report_delay_s
        inner = rpc.channel(address, token=TOKEN) if channel is None else channel
        self.channel = with_metadata(inner, self.metadata)
        groups = group_service_pb2_grpc.GroupServiceStub(self.channel)
        policies = policy_service_pb2_grpc.PolicyServiceStub(self.channel)
        self.groups = cast("GroupServiceAsyncStub", groups)
        self.policies = cast("PolicyServiceAsyncStub", policies)
        self.updated = asyncio.Event()

    def metadata(self) -> dict[str, str]:
        return {} if self.run_epoch is None else {"flotilla-run-epoch": str(self.run_epoch)}

    async def attach(self) -> None:
        """Follow the policy; report every update as applied."""
        request = policy_service_pb2.AttachRequest(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            device_count=1,
            transports=[policy_service_pb2.TRANSPORT_SHM],
            host_digest=host_digest(),
            tokenizer_digest=TOKENIZER,
        )
        async for response in self.policies.Attach(request):
            self.run_epoch = response.run_epoch
            update = response.update
            self.updates.append(update)
            canary = np.full(len(update.canary_token_ids) // 4 - 1, self.canary, dtype="<f4")
            report = policy_service_pb2.ReportPolicyRequest(
                worker_id=self.worker_id,
                policy=update.policy,
                canary_logprobs=canary.tobytes(),
                outcome=policy_service_pb2.UPDATE_OUTCOME_APPLIED,
                probes=self._answers(update),
            )
            self.policy.CopyFrom(update.policy)
            await asyncio.sleep(self._report_delay_s)
            await self.policies.ReportPolicy(report)
            self.updated.set()

    def _answers(self, update: policy_service_pb2.Update) -> list[policy_service_pb2.ProbeResult]:
        if self.probed is None:
            return []
        ids = np.arange(3, dtype="<i4").tobytes()
        logprobs = np.full(3, self.probed, dtype="<f4").tobytes()
        answer = policy_service_pb2.ProbeResult(token_ids=ids, logprobs=logprobs)
        return [answer] * len(update.probes)

    async def poll(self, *, free_attempts: int = 64, request_id: str = "") -> pb.Lease | None:
        request = pb.LeaseGroupRequest(
            request_id=request_id or uuid4().hex,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            free_attempts=free_attempts,
            tokenizer_digest=TOKENIZER,
        )
        if self.policy.fingerprint:
            request.holding.CopyFrom(self.policy)
        response = await self.groups.LeaseGroup(request, timeout=60)
        self.run_epoch = response.run_epoch
        return response.lease if response.HasField("lease") else None

    async def submit(self, submission: Submission) -> pb.SubmitTrajectoryResponse:
        submission.header.worker_id = self.worker_id
        response = await self.groups.SubmitTrajectory(submission.parts(), timeout=60)
        k = submission.header.key
        self.receipts[k.group_id, k.attempt_index, getattr(k, "try")] = submission.content_digest
        return response

    async def play(self, lease: pb.Lease) -> None:
        for attempt in lease.attempts:
            await asyncio.sleep(self._delay_s)
            policy = policy_pb2.PolicyId()
            policy.CopyFrom(self.policy)
            await self.submit(self.show(lease, attempt, graded(lease, attempt, policy)))

    def show(self, lease: pb.Lease, attempt: pb.LeasedAttempt, made: Submission) -> Submission:
        """Return what it has seen in an attempt."""
        return made

    async def work(self) -> None:
        """Lease a group and play it, for ever."""
        await self.updated.wait()
        while True:
            if lease := await self.poll():
                await self.play(lease)

    async def persist(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat `step` for ever, even if the learner restarts."""
        while True:
            try:
                await step()
            except grpc.aio.AioRpcError as error:
                refusal = rpc.service_error(error)
                if refusal and refusal.reason == "STALE_EPOCH":
                    self.run_epoch = int(refusal.metadata["run_epoch"])
                elif refusal and refusal.reason not in ("LEASE_LOST", "DRAINING", "STREAM_ENDED"):
                    raise
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["FakeWorker"]:
        """Attached and at work; continues over restarts of the learner."""
        steps = (self.attach, self.work)
        tasks = [asyncio.create_task(self.persist(step)) for step in steps]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
            await self.channel.close()
