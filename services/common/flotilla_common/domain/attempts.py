"""Attempts: their keys and purposes, and the outcomes of calls, grades and tries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# Largest absolute reward: a larger one could overflow a mean or a variance.
MAX_REWARD = 1e6
# Why the attempts of a group have no grade whose judge came to no verdict; only a learner says so.
JUDGE_FAILED = "judge_failed"
# Most named rewards of an attempt, and what a name is: also a part of a metric's.
MOST_NAMED_REWARDS = 32
REWARD_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class Purpose(StrEnum):
    """Purpose of the sampled trajectories."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """One try at one attempt of one group."""

    group_id: str
    attempt_index: int
    attempt_try: int


class StopReason(StrEnum):
    """Reason for the end of an attempt that counts."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"
    GENERATION_LENGTH = "generation_length"
    TIMEOUT = "timeout"
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    MAX_CALLS = "max_calls"
    MAX_PARSE_ERRORS = "max_parse_errors"


class FailureKind(StrEnum):
    """Reason why an attempt does not count."""

    ENV_LOST = "env_lost"
    ENGINE_ERROR = "engine_error"
    ABORTED = "aborted"
    NO_GRADE = "no_grade"
    # The policy's next input cannot be rendered: its whole group is dropped.
    TEMPLATE_ERROR = "template_error"
    # The learner does not take the try, which is a bug of either side: its whole group is dropped.
    REFUSED_BY_LEARNER = "refused_by_learner"

    @property
    def spoils_group(self) -> bool:
        """True if no other attempt of the group may be used: those that ended without this failure
        are a biased selection. It is never retried."""
        return self in (FailureKind.TEMPLATE_ERROR, FailureKind.REFUSED_BY_LEARNER)


class NoGradeReason(StrEnum):
    """Reason why a grade is unknown."""

    EXECUTION_FAILED = "execution_failed"
    JUDGE_ERROR = "judge_error"
    INSTANCE_LOST = "instance_lost"
    TIMEOUT = "timeout"
    NO_VERIFIER = "no_verifier"
    TAINTED = "tainted"
    # A recorded run is replayed, which does not hold it.
    REPLAY_MISS = "replay_miss"


@dataclass(frozen=True, slots=True)
class Grade:
    """A known `reward`, or the `reason` why it is unknown, or neither, if a judge compares the
    attempt with the others of its group (`to_be_judged`). `named_rewards` are further numbers that
    the verifier returned, each a reward of its own: a name that is missing is unknown.

    `suspicion` is a printed failure of a judge that did not count, because the policy may have
    written it. `verifier_fault` is set if the verifier itself is the reason."""

    reward: float | None = None
    reason: NoGradeReason | None = None
    detail: str = ""
    partial_reward: float | None = None
    checks_passed: tuple[str, ...] = ()
    checks_failed: tuple[str, ...] = ()
    stdout: str = ""
    attempts: int = 1
    suspicion: str = ""
    verifier_fault: bool = False
    named_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    to_be_judged: bool = False

    @property
    def is_known(self) -> bool:
        return self.reward is not None


class ToolOutcome(StrEnum):
    """Outcome of a tool call."""

    OK = "ok"
    TOOL_ERROR = "tool_error"
    BAD_TOOL = "bad_tool"
    BAD_ARGUMENTS = "bad_arguments"
    NOT_EXECUTED = "not_executed"
    OUTCOME_UNKNOWN = "outcome_unknown"
    DEADLINE = "deadline"
    SESSION_LOST = "session_lost"
    REPLAY_MISS = "replay_miss"
