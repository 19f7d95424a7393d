"""Witnesses against a task, and the meaning of the gateway's refusals."""

from flotilla_common.domain.attempts import AttemptKey, FailureKind
from flotilla_common.domain.trajectory import Counts, Trajectory
from flotilla_learner.sampling.refused_tasks import Refusal, RefusalHistory, common_refusal
from flotilla_learner.sampling.suspect_tasks import SuspectTask, Witnesses

INFINITY = float("inf")


def test_a_grade_of_another_task_in_the_meantime_decides_at_once() -> None:
    witnesses = Witnesses()
    witnesses.note_graded("shop", "good", 1.0, 5.0)
    assert witnesses.judge_suspect("shop", SuspectTask("bad", 4.0, 6.0))
    assert not witnesses.judge_suspect("desk", SuspectTask("bad", 4.0, 6.0))


def test_a_grade_of_the_task_itself_or_from_before_decides_nothing() -> None:
    witnesses = Witnesses()
    witnesses.note_graded("shop", "good", 1.0, 3.0)
    witnesses.note_graded("shop", "bad", 4.0, 5.0)
    assert not witnesses.judge_suspect("shop", SuspectTask("bad", 4.0, 6.0))


def test_who_waits_is_convicted_by_a_try_that_began_before_the_end() -> None:
    witnesses = Witnesses()
    witnesses.judge_suspect("shop", SuspectTask("bad", 4.0, 6.0))
    witnesses.judge_suspect("shop", SuspectTask("early", 1.0, 2.0))
    assert [s.task for s in witnesses.note_graded("shop", "good", 5.0, 9.0)] == ["bad"]
    assert [s.task for s in witnesses.note_graded("shop", "good", 1.5, 9.0)] == ["early"]
    assert witnesses.note_graded("shop", "good", 0.0, 9.0) == []


def test_who_is_graded_at_last_is_free() -> None:
    witnesses = Witnesses()
    witnesses.judge_suspect("shop", SuspectTask("bad", 4.0, 6.0))
    assert witnesses.note_graded("shop", "bad", 7.0, 8.0) == []
    assert witnesses.note_graded("shop", "good", 5.0, 9.0) == []


def lost(detail: str, kind: FailureKind = FailureKind.ENV_LOST) -> Trajectory:
    return Trajectory(AttemptKey("g", 0, 0), "", (), b"", failure=kind, detail=detail)


def test_only_a_refusal_of_every_try_is_one() -> None:
    bad, unknown = lost("BAD_TASK: no prompt"), lost("UNKNOWN_ENVIRONMENT: no such")
    assert common_refusal([bad, bad]) == (Refusal.BAD_TASK, "BAD_TASK: no prompt")
    assert common_refusal([unknown]) == (
        Refusal.UNKNOWN_ENVIRONMENT,
        "UNKNOWN_ENVIRONMENT: no such",
    )
    assert common_refusal([bad, unknown]) is None
    assert common_refusal([bad, lost("UNAVAILABLE: away")]) is None
    assert common_refusal([lost("BAD_TASK: x", FailureKind.ABORTED)]) is None
    assert common_refusal([]) is None


def refused(
    refusals: RefusalHistory, task: str, *, at: float = 2.0, open_since: float = INFINITY
) -> str:
    return refusals.note_refused(
        "shop", task, Refusal.BAD_TASK, "why", at=at, open_since=open_since
    )


def test_an_environment_is_refused_when_all_of_a_small_one_are() -> None:
    refusals = RefusalHistory({"shop": 2}, ())
    assert refused(refusals, "a") == ""
    assert refused(refusals, "a") == ""
    assert "its reason for 'b' is why" in refused(refusals, "b")


def test_a_group_that_is_at_work_since_before_may_still_show_that_it_works() -> None:
    refusals = RefusalHistory({"shop": 1}, ())
    assert refused(refusals, "a", at=2.0, open_since=1.0) == ""
    assert refused(refusals, "a", at=3.0, open_since=2.5) != ""


def test_an_environment_that_ever_opened_is_never_refused() -> None:
    assert refused(RefusalHistory({"shop": 1}, {"shop"}), "a") == ""
    refusals = RefusalHistory({"shop": 1}, ())
    opened = Trajectory(
        AttemptKey("g", 0, 0),
        *("", (), b""),
        failure=FailureKind.ENV_LOST,
        detail="later",
        counts=Counts(open_s=1.0),
    )
    refusals.note_attempt("shop", opened)
    assert refused(refusals, "a") == ""
