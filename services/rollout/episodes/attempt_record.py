"""The record of a running attempt, and the trajectory made of it at the end."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from math import inf

import numpy as np

from services.common.domain.attempts import AttemptKey, FailureKind, StopReason
from services.common.domain.trajectory import Counts, TurnTiming
from services.rollout.episodes.transcript import Transcript
from services.rollout.types import EpisodeInfo, Grade, Trajectory

MAX_DETAIL = 2_000


@dataclass(slots=True)
class AttemptState:
    """State of one attempt so far."""

    started: float
    transcript: Transcript = field(default_factory=lambda: Transcript([]))
    counts: Counts = field(default_factory=Counts)
    turns: list[TurnTiming] = field(default_factory=list[TurnTiming])
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    calls_made: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    info: EpisodeInfo | None = None
    answer: str | None = None
    digests: dict[str, bytes] = field(default_factory=dict[str, bytes])
    # When the attempt's time is over, on the clock of `started`.
    ends: float = inf

    @property
    def is_single_turn(self) -> bool:
        """True when there is nothing to call: the first turn is the answer."""
        return self.info is not None and not self.info.tools


def compute_digests(info: EpisodeInfo, transcript: Transcript) -> dict[str, bytes]:
    """Digest the tools as the environment gave them, and the prompt's token ids."""
    tools = json.dumps([asdict(tool) for tool in info.tools], sort_keys=True)
    return {
        "tool_schema": hashlib.sha256(tools.encode()).digest(),
        "prompt": hashlib.sha256(transcript.token_ids.astype("<i4").tobytes()).digest(),
    }


def make_finished_trajectory(
    key: AttemptKey, state: AttemptState, stop: StopReason, grade: Grade
) -> Trajectory:
    return Trajectory(
        key=key,
        token_ids=state.transcript.token_ids,
        spans=state.transcript.spans,
        logprobs=state.transcript.logprobs,
        counts=state.counts,
        turns=tuple(state.turns),
        grade=grade,
        stop_reason=stop,
        detail=grade.detail[:MAX_DETAIL],
        info=state.info,
        digests=state.digests,
    )


def make_failed_trajectory(
    key: AttemptKey, state: AttemptState, kind: FailureKind, detail: str
) -> Trajectory:
    """Make the trajectory of a failed try: its counts and timings, without its tokens."""
    return Trajectory(
        key=key,
        token_ids=np.zeros(0, np.int32),
        spans=(),
        logprobs=np.zeros(0, np.float32),
        counts=state.counts,
        turns=tuple(state.turns),
        failure=kind,
        detail=detail[:MAX_DETAIL],
        info=state.info,
        digests=state.digests,
    )
