"""Conversion between the contracts and the rollout's own types."""

import json
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla.env_gateway.v1 import episode_service_pb2 as env_pb
from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.images.picture import Picture, PlacedPicture, ShownPicture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.rpc.rpc import to_seconds
from flotilla_common.wire.enums import NO_GRADE_REASONS, PURPOSES, TOOL_OUTCOMES
from flotilla_common.wire.policy import decode_manifest, decode_policy, encode_policy
from flotilla_rollout.types import (
    Completion,
    EpisodeInfo,
    Lease,
    LeasedAttempt,
    Probe,
    PromptFacts,
    Publication,
    Sampling,
    Tool,
    ToolResult,
    UpdateOutcome,
)


def lease_from_pb(lease: group_pb.Lease) -> Lease:
    sampling = lease.sampling
    return Lease(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        task_json=lease.task_json,
        attempts=tuple(
            LeasedAttempt(item.attempt_index, item.next_try, item.seed) for item in lease.attempts
        ),
        purpose=PURPOSES.decode(lease.purpose),
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k if sampling.HasField("top_k") else 0,
        min_policy=decode_policy(lease.min_policy) if lease.HasField("min_policy") else None,
        exact_policy=(
            decode_policy(lease.exact_policy) if lease.HasField("exact_policy") else None
        ),
        group_deadline_s=to_seconds(lease.group_deadline),
        lease_ttl_s=to_seconds(lease.lease_ttl),
        max_tries=lease.max_tries,
    )


def publication_from_pb(update: policy_pb.Update) -> Publication:
    return Publication(
        policy=decode_policy(update.policy),
        manifest=decode_manifest(update.manifest),
        total_bytes=update.manifest.total_bytes,
        transport=policy_pb.Transport.Name(update.transport).removeprefix("TRANSPORT_").lower(),
        location=update.location,
        canary_token_ids=np.frombuffer(update.canary_token_ids, dtype="<i4").astype(np.int32),
        timeout_s=to_seconds(update.publish_timeout),
        reload=update.reload,
        keep=update.keep,
        canary_pictures=tuple(_canary_picture(each) for each in update.canary_pictures),
        probes=tuple(
            Probe(
                np.frombuffer(probe.prompt_token_ids, dtype="<i4").astype(np.int32),
                probe.max_tokens,
                Sampling(probe.temperature, probe.seed),
            )
            for probe in update.probes
        ),
    )


def _canary_picture(message: policy_pb.CanaryPicture) -> ShownPicture:
    """Convert a picture of the canary. Raises PictureRefused, and ValueError for a wrong grid."""
    picture = read_picture(message.data)
    time, high, wide = message.grid
    return ShownPicture(
        picture, PlacedPicture(picture.sha256, (time, high, wide), message.token_offset)
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
        policy=encode_policy(publication.policy),
        canary_logprobs=logprobs.astype("<f4").tobytes(),
        outcome=policy_pb.UpdateOutcome.Value(f"UPDATE_OUTCOME_{outcome.upper()}"),
        detail=detail,
        probes=[_probe_to_pb(completion) for completion in probed],
    )


def _probe_to_pb(completion: Completion) -> policy_pb.ProbeResult:
    return policy_pb.ProbeResult(
        token_ids=completion.token_ids.astype("<i4").tobytes(),
        logprobs=completion.logprobs.astype("<f4").tobytes(),
    )


def episode_from_pb(
    episode_id: str, ready: env_pb.EpisodeReady, shown: Iterable[str | Picture] = ()
) -> EpisodeInfo:
    """Convert a ready episode; `shown` is the first observation as the policy reads it.

    Raises ValueError or TypeError if a tool's schema is not a JSON object."""
    shown = tuple(shown)
    return EpisodeInfo(
        episode_id=episode_id,
        tools=tuple(_tool_from_pb(tool) for tool in ready.tools),
        facts=PromptFacts(
            ready.facts.prompt,
            ready.facts.current_date,
            dict(sorted(ready.facts.variables.items())),
            tuple(part for part in shown if isinstance(part, str)),
            tuple(part for part in shown if isinstance(part, Picture)),
        ),
        instance_id=ready.instance_id,
        env_version=ready.env_version,
        data_version=ready.data_version,
        deadline_s=to_seconds(ready.deadline) if ready.HasField("deadline") else float("inf"),
        transcript_bytes=ready.transcript_bytes,
    )


def _tool_from_pb(tool: env_pb.Tool) -> Tool:
    schema = json.loads(tool.input_schema_json or "{}")
    if not isinstance(schema, dict):
        raise TypeError(f"the schema of tool {tool.name!r} must be a JSON object")
    return Tool(tool.name, tool.description, schema, tool.read_only, tool.parallel)


def tool_result_from_pb(
    response: env_pb.CallToolResponse, parts: Iterable[str | Picture]
) -> ToolResult:
    """Convert a tool's answer; `parts` are its parts as the policy reads them."""
    given = response.HasField("reward") and math.isfinite(response.reward)
    reward = response.reward if given else None
    return ToolResult(TOOL_OUTCOMES.decode(response.outcome), tuple(parts), response.done, reward)


def grade_from_pb(response: env_pb.GradeResponse) -> Grade:
    kind, code = response.WhichOneof("grade"), response.no_grade.reason
    if kind == "to_be_judged":
        return Grade(to_be_judged=True)
    graded = kind == "reward"
    reason = NO_GRADE_REASONS.decode(code) if code else NoGradeReason.EXECUTION_FAILED
    return Grade(
        reward=response.reward if graded else None,
        reason=None if graded else reason,
        detail=response.no_grade.detail,
        partial_reward=response.partial_reward if response.HasField("partial_reward") else None,
        checks_passed=tuple(response.checks_passed),
        checks_failed=tuple(response.checks_failed),
        suspicion=response.suspicion,
        named_rewards=dict(response.named_rewards) if graded else {},
    )
