"""The record of a running attempt, and the trajectory built from it at the end."""

import json
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from flotilla_common.domain.attempts import AttemptKey, FailureKind, Grade, StopReason
from flotilla_common.domain.trajectory import (
    Counts,
    Facts,
    Trajectory,
    TurnTiming,
    content_digest,
)
from flotilla_rollout.episodes.conversation import Conversation
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.types import EpisodeInfo, Lease

MAX_DETAIL = 2_000


@dataclass(slots=True)
class AttemptState:
    """State of one attempt so far."""

    started: float
    transcript: Transcript = field(default_factory=lambda: Transcript([]))
    counts: Counts = field(default_factory=Counts)
    turns: list[TurnTiming] = field(default_factory=list[TurnTiming])
    # What the verifier reads.
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    conversation: Conversation = field(default_factory=Conversation)
    # The tools that the chat template was given, as JSON.
    tools: bytes = b""
    calls_made: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    info: EpisodeInfo | None = None
    answer: str | None = None
    digests: dict[str, str] = field(default_factory=dict[str, str])
    # End of the attempt's time, on the clock of `started`.
    ends: float = inf
    # Seconds of it in which the engine's service answered nobody.
    waited_s: float = 0.0

    @property
    def is_single_turn(self) -> bool:
        """True if there is no tool: the first turn is the answer."""
        return self.info is not None and not self.info.tools


def make_finished_trajectory(
    key: AttemptKey, state: AttemptState, stop: StopReason, grade: Grade
) -> Trajectory:
    sequence = state.transcript.sequence
    media = {item.sha256 for item in sequence.media}
    messages = state.conversation.encode(sequence.spans, media)
    sequences = (replace(sequence, messages=messages),)
    return Trajectory(
        key=key,
        lease_id="",
        sequences=sequences,
        content_digest=content_digest(sequences),
        reward=grade.reward,
        failure=None if grade.is_known or grade.to_be_judged else FailureKind.NO_GRADE,
        no_grade=grade.reason or "",
        judged=grade.to_be_judged,
        detail=grade.detail[:MAX_DETAIL],
        stop_reason=stop,
        partial_reward=grade.partial_reward,
        named_rewards=grade.named_rewards,
        checks_passed=grade.checks_passed,
        checks_failed=grade.checks_failed,
        suspicion=grade.suspicion[:MAX_DETAIL],
        turns=tuple(state.turns),
        counts=state.counts,
        facts=_make_facts(state),
        tools=state.tools,
        pictures=state.transcript.files,
    )


def make_failed_trajectory(
    key: AttemptKey, state: AttemptState, kind: FailureKind, detail: str
) -> Trajectory:
    """Build the trajectory of a failed try: its counts and timings, without its tokens."""
    return Trajectory(
        key=key,
        lease_id="",
        sequences=(),
        content_digest=content_digest(()),
        failure=kind,
        detail=detail[:MAX_DETAIL],
        turns=tuple(state.turns),
        counts=state.counts,
        facts=_make_facts(state),
    )


def make_submission(trajectory: Trajectory, lease: Lease, worker_id: str) -> Trajectory:
    """Add the lease, the task and the worker of a try.

    A failed try carries no tokens."""
    task: dict[str, Any] = json.loads(lease.task_json)
    if trajectory.failure is not None:
        trajectory = replace(
            trajectory, sequences=(), content_digest=content_digest(()), tools=b"", pictures={}
        )
    return replace(
        trajectory,
        lease_id=lease.lease_id,
        facts=replace(
            trajectory.facts,
            env_key=str(task.get("env_key") or task.get("env_id") or ""),
            task_key=str(task.get("task_key") or task.get("key") or ""),
            worker_id=worker_id,
        ),
    )


def _make_facts(state: AttemptState) -> Facts:
    facts, info = Facts(**state.digests), state.info
    if info is None:
        return facts
    return replace(
        facts,
        instance_id=info.instance_id,
        env_version=info.env_version,
        data_version=info.data_version,
    )
