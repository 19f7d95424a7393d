"""Groups and their leases, as shared by the journal, the API and the rooms of the learner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flotilla_common.domain.attempts import AttemptKey, Purpose
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.sampling.tasks import Task


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Fixed properties of a group."""

    group_id: str
    # Position in the curriculum; -1 for EVAL.
    sequence_number: int
    task: Task
    purpose: Purpose
    size: int
    temperature: float
    # Times that its task was dropped before.
    requeues: int = 0
    eval_id: str = ""
    # Set for EVAL: sample from exactly this policy.
    exact_policy: PolicyId | None = None
    # Candidates of each token; 0: the whole vocabulary.
    top_k: int = 0
    top_p: float = 1.0

    def to_requeued(self) -> "GroupSpec":
        """Make a new group for the same task."""
        stem = self.group_id.rsplit("r", 1)[0]
        requeues = self.requeues + 1
        return replace(self, group_id=f"{stem}r{requeues}", requeues=requeues)


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to sample the missing attempts of one group."""

    lease_id: str
    group: GroupSpec
    # Pairs (attempt index, number of its next try).
    attempts: tuple[tuple[int, int], ...]
    min_policy: PolicyId
    worker_id: str
    deadline: float


@dataclass(slots=True)
class SubmittedTry:
    """A try on its way in: what its header claims, then what each step of the intake adds."""

    lease_id: str
    worker_id: str
    key: AttemptKey
    # Added on admission. Without a lease, it is a repeat of a try that is already journaled.
    leased: bool = False
    group: GroupSpec = field(init=False)
    # Added once it is read whole.
    trajectory: Trajectory = field(init=False)
    # Added by the judgement: how often its worker had been refused, and why it is not used, if so.
    refusals: int = 0
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group that needs no more work; dropped if `reason` is set."""

    group: GroupSpec
    graded: tuple[AttemptKey, ...]
    # Oldest version that wrote any of its tokens.
    oldest_version: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """What a judge says about the attempts of a group that awaited it: the `scores` by attempt, or
    none of them, for the reason `failure`.

    `request_digest` is the SHA-256 of the first question, `answer` the text of the last answer;
    `calls` and tokens are those of all."""

    group_id: str
    scores: Mapping[int, float] | None
    failure: str
    model: str
    request_digest: bytes
    answer: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    # From the first question to the last answer.
    seconds: float
