"""Conversion of the contracts to the rollout's own types and back."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.env_gateway.v1 import episode_service_pb2 as env_pb
from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import policy_pb2, trajectory_pb2
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from services.common.domain.attempts import AttemptKey, Purpose, ToolOutcome
from services.common.domain.policy import PolicyId
from services.common.domain.trajectory import Span
from services.common.fingerprint import TensorEntry
from services.common.rpc import to_duration, to_seconds
from services.rollout.types import (
    Completion,
    EpisodeInfo,
    Grade,
    Lease,
    LeasedAttempt,
    Probe,
    PromptFacts,
    Publication,
    Sampling,
    Tool,
    ToolResult,
    Trajectory,
    UpdateOutcome,
)

# Bytes of one array in one message, which stays under 1 MiB with all around it.
CHUNK_BYTES = 512 * 1024

# Only what a Lease names can be asked for, so a value that this code does not know is TRAIN's.
PURPOSES = {group_pb.PURPOSE_TRAIN: Purpose.TRAIN, group_pb.PURPOSE_EVAL: Purpose.EVAL}


def policy_to_pb(policy: PolicyId) -> policy_pb2.PolicyId:
    return policy_pb2.PolicyId(
        run_epoch=policy.run_epoch, version=policy.version, fingerprint=policy.fingerprint
    )


def policy_from_pb(policy: policy_pb2.PolicyId) -> PolicyId:
    return PolicyId(policy.run_epoch, policy.version, policy.fingerprint)


def lease_from_pb(lease: group_pb.Lease) -> Lease:
    sampling = lease.sampling
    return Lease(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        task_json=lease.task_json,
        attempts=tuple(
            LeasedAttempt(item.attempt_index, item.next_try, item.seed) for item in lease.attempts
        ),
        purpose=PURPOSES[lease.purpose],
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k if sampling.HasField("top_k") else 0,
        min_policy=policy_from_pb(lease.min_policy) if lease.HasField("min_policy") else None,
        exact_policy=(
            policy_from_pb(lease.exact_policy) if lease.HasField("exact_policy") else None
        ),
        group_deadline_s=to_seconds(lease.group_deadline),
        lease_ttl_s=to_seconds(lease.lease_ttl),
        max_tries=lease.max_tries,
    )


def publication_from_pb(update: policy_pb.Update) -> Publication:
    return Publication(
        policy=policy_from_pb(update.policy),
        manifest=tuple(
            TensorEntry(t.name, t.dtype, tuple(t.shape), t.offset_bytes, t.checksum)
            for t in update.manifest.tensors
        ),
        total_bytes=update.manifest.total_bytes,
        transport=policy_pb.Transport.Name(update.transport).removeprefix("TRANSPORT_").lower(),
        location=update.location,
        canary_token_ids=np.frombuffer(update.canary_token_ids, dtype="<i4").astype(np.int32),
        timeout_s=to_seconds(update.publish_timeout),
        generation=update.generation,
        reload=update.reload,
        probes=tuple(
            Probe(
                np.frombuffer(probe.prompt_token_ids, dtype="<i4").astype(np.int32),
                probe.max_tokens,
                Sampling(probe.temperature, probe.seed),
            )
            for probe in update.probes
        ),
    )


def report_to_pb(
    worker_id: str,
    publication: Publication,
    outcome: UpdateOutcome,
    logprobs: NDArray[np.float32],
    detail: str,
    probed: Sequence[Completion] = (),
) -> policy_pb.ReportPolicyRequest:
    return policy_pb.ReportPolicyRequest(
        worker_id=worker_id,
        generation=publication.generation,
        policy=policy_to_pb(publication.policy),
        canary_logprobs=logprobs.astype("<f4").tobytes(),
        outcome=policy_pb.UpdateOutcome.Value(f"UPDATE_OUTCOME_{outcome.upper()}"),
        detail=detail,
        probes=[
            policy_pb.ProbeResult(
                token_ids=sampled.token_ids.astype("<i4").tobytes(),
                logprobs=sampled.logprobs.astype("<f4").tobytes(),
            )
            for sampled in probed
        ],
    )


def submission_to_pb(
    lease_id: str, worker_id: str, task: dict[str, Any], trajectory: Trajectory
) -> Iterator[group_pb.SubmitTrajectoryRequest]:
    """Yield header, chunks and end. A try without a grade carries no sequences."""
    header = _header_to_pb(lease_id, worker_id, task, trajectory)
    yield group_pb.SubmitTrajectoryRequest(header=header)
    digest = hashlib.sha256()
    if trajectory.is_graded:
        tokens = trajectory.token_ids.astype("<i4").tobytes()
        logprobs = trajectory.logprobs.astype("<f4").tobytes()
        digest.update(tokens)
        digest.update(logprobs)
        for start in range(0, len(tokens), CHUNK_BYTES):
            yield _chunk_to_pb(token_ids=tokens[start : start + CHUNK_BYTES])
        for start in range(0, len(logprobs), CHUNK_BYTES):
            yield _chunk_to_pb(logprobs=logprobs[start : start + CHUNK_BYTES])
    end = trajectory_pb2.TrajectoryEnd(content_digest=digest.digest())
    yield group_pb.SubmitTrajectoryRequest(end=end)


def _chunk_to_pb(
    *, token_ids: bytes = b"", logprobs: bytes = b""
) -> group_pb.SubmitTrajectoryRequest:
    chunk = trajectory_pb2.SequenceChunk(token_ids=token_ids, logprobs=logprobs)
    return group_pb.SubmitTrajectoryRequest(chunk=chunk)


def _header_to_pb(
    lease_id: str, worker_id: str, task: dict[str, Any], trajectory: Trajectory
) -> trajectory_pb2.TrajectoryHeader:
    header = trajectory_pb2.TrajectoryHeader(
        key=_key_to_pb(trajectory.key),
        lease_id=lease_id,
        worker_id=worker_id,
        detail=trajectory.detail,
        turns=[
            trajectory_pb2.TurnTiming(
                generate=to_duration(turn.generate_s),
                tools=to_duration(turn.tools_s),
                prompt_tokens=turn.prompt_tokens,
                generated_tokens=turn.generated_tokens,
            )
            for turn in trajectory.turns
        ],
        counts=_counts_to_pb(trajectory),
        env_key=str(task.get("env_key") or task.get("env_id") or ""),
        task_key=str(task.get("task_key") or task.get("key") or ""),
        tool_schema_digest=trajectory.digests.get("tool_schema", b""),
        prompt_digest=trajectory.digests.get("prompt", b""),
    )
    if trajectory.info is not None:
        header.instance_id = trajectory.info.instance_id
        header.env_version = trajectory.info.env_version
        header.data_version = trajectory.info.data_version
    if trajectory.is_graded:
        header.sequences.append(_sequence_to_pb(trajectory))
    _set_outcome(header, trajectory)
    return header


def _key_to_pb(key: AttemptKey) -> trajectory_pb2.TrajectoryKey:
    # `try` is a word of Python's, so the field cannot be named as an argument.
    fields = {
        "group_id": key.group_id,
        "attempt_index": key.attempt_index,
        "try": key.attempt_try,
    }
    return trajectory_pb2.TrajectoryKey(**fields)  # pyright: ignore[reportArgumentType]


def _sequence_to_pb(trajectory: Trajectory) -> trajectory_pb2.SequenceHeader:
    return trajectory_pb2.SequenceHeader(
        token_count=len(trajectory.token_ids),
        spans=[_span_to_pb(span) for span in trajectory.spans],
    )


def _span_to_pb(span: Span) -> trajectory_pb2.Span:
    return trajectory_pb2.Span(
        author=trajectory_pb2.Author.Value(f"AUTHOR_{span.author.upper()}"),
        length=span.length,
        policy=None if span.policy is None else policy_to_pb(span.policy),
        temperature=span.temperature,
    )


def _counts_to_pb(trajectory: Trajectory) -> trajectory_pb2.TrajectoryCounts:
    counts = trajectory.counts
    return trajectory_pb2.TrajectoryCounts(
        turns=counts.turns,
        tool_calls=counts.tool_calls,
        tool_errors=counts.tool_errors,
        parse_errors=counts.parse_errors,
        repeats=counts.repeats,
        open=to_duration(counts.open_s),
        grade=to_duration(counts.grade_s),
        tools=counts.tools,
        malformed_turns=counts.malformed_turns,
        parse_messages=counts.parse_messages,
        unknown_tools=counts.unknown_tools,
    )


def _set_outcome(header: trajectory_pb2.TrajectoryHeader, trajectory: Trajectory) -> None:
    grade = trajectory.grade
    if trajectory.stop_reason is not None:
        name = f"STOP_REASON_{trajectory.stop_reason.upper()}"
        header.stop_reason = trajectory_pb2.StopReason.Value(name)
    if trajectory.failure is not None:
        name = f"FAILURE_KIND_{trajectory.failure.upper()}"
        header.failure = trajectory_pb2.FailureKind.Value(name)
    if grade is None:
        return
    header.checks_passed.extend(grade.checks_passed)
    header.checks_failed.extend(grade.checks_failed)
    header.suspicion = grade.suspicion
    if grade.partial_reward is not None:
        header.partial_reward = grade.partial_reward
    if grade.reward is not None:
        header.reward = grade.reward
    else:
        name = f"NO_GRADE_REASON_{grade.no_grade.upper()}"
        header.no_grade = trajectory_pb2.NoGradeReason.Value(name)


def episode_from_pb(
    episode_id: str, ready: env_pb.EpisodeReady, shown: Iterable[str] = ()
) -> EpisodeInfo:
    """Convert a ready episode; `shown` is what the policy reads of the first observation.

    Raises ValueError or TypeError when a tool's schema is no JSON object."""
    return EpisodeInfo(
        episode_id=episode_id,
        tools=tuple(_tool_from_pb(tool) for tool in ready.tools),
        facts=PromptFacts(
            ready.facts.prompt,
            ready.facts.current_date,
            dict(sorted(ready.facts.variables.items())),
            tuple(shown),
        ),
        instance_id=ready.instance_id,
        env_version=ready.env_version,
        data_version=ready.data_version,
        deadline_s=to_seconds(ready.deadline) if ready.HasField("deadline") else float("inf"),
    )


def _tool_from_pb(tool: env_pb.Tool) -> Tool:
    schema = json.loads(tool.input_schema_json or "{}")
    if not isinstance(schema, dict):
        raise TypeError(f"the schema of tool {tool.name!r} must be a JSON object")
    return Tool(tool.name, tool.description, schema, tool.read_only)


def tool_result_from_pb(response: env_pb.CallToolResponse, texts: Iterable[str]) -> ToolResult:
    """Convert a tool's answer; `texts` are what the policy reads of the parts."""
    name = env_pb.ToolOutcome.Name(response.outcome).removeprefix("TOOL_OUTCOME_").lower()
    return ToolResult(ToolOutcome(name), tuple(texts), response.done)


def grade_from_pb(response: env_pb.GradeResponse) -> Grade:
    graded = response.WhichOneof("grade") == "reward"
    reason = env_pb.NoGradeReason.Name(response.no_grade.reason)
    known = reason != "NO_GRADE_REASON_UNSPECIFIED"
    no_grade = reason.removeprefix("NO_GRADE_REASON_").lower() if known else "execution_failed"
    return Grade(
        reward=response.reward if graded else None,
        no_grade="" if graded else no_grade,
        detail=response.no_grade.detail,
        partial_reward=response.partial_reward if response.HasField("partial_reward") else None,
        checks_passed=tuple(response.checks_passed),
        checks_failed=tuple(response.checks_failed),
        suspicion=response.suspicion,
    )
