"""From grades to the results of a task's checks. Pure."""

from collections.abc import Mapping, Sequence

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.tasks.task_checks import CheckResult, Outcome
from flotilla_reading.play.ports import Grade, OfferedTool, PlayError
from flotilla_reading.play.solutions import Solution

# Increase it when a task may get another verdict.
CHECKER = 3
CHECKS = ("gold", "noop", "determinism", "exploit", "leak", "reachable")
_PRINTED_CHARS = 1000


def unchecked(why: str) -> CheckResult:
    return CheckResult(Outcome.UNCHECKED, why)


def judge_failure(error: PlayError) -> CheckResult:
    """Return the result of checks that could not be made. A task that its environment refuses is
    invalid, unless it is the spec that names another environment than is meant."""
    if error.task_fault:
        return CheckResult(Outcome.INVALID, str(error), provisional=True)
    return CheckResult(Outcome.TIMEOUT if error.timed_out else Outcome.ERROR, str(error))


def is_pass(grade: Grade) -> bool:
    return grade.reward is not None and grade.reward >= PASS_REWARD


def judge_gold(did: str, grade: Grade) -> CheckResult:
    """Judge the grade of a solution, which must pass."""
    if is_pass(grade):
        return _result(Outcome.VALID, f"{did} passes", [grade])
    return _judge_missing(did, grade) or _result(Outcome.INVALID, f"{did} does not pass", [grade])


def judge_noop(grade: Grade, *, may_pass: bool) -> CheckResult:
    """Judge the grade of an untouched world, which must not pass unless it `may_pass`."""
    did = "an untouched world"
    if is_pass(grade) and not may_pass:
        return _result(Outcome.INVALID, f"{did} passes", [grade])
    passes = "passes, as the task says" if is_pass(grade) else "does not pass"
    return _judge_missing(did, grade) or _result(Outcome.VALID, f"{did} {passes}", [grade])


def judge_determinism(states: Mapping[str, Sequence[Grade]]) -> CheckResult:
    """Judge several grades of each of some states, which must agree."""
    for state, grades in states.items():
        known = {grade.reward for grade in grades if _is_about_task(grade)}
        if len(known) > 1:
            return _result(Outcome.INVALID, f"the grades of {state} differ", grades)
    for state, grades in states.items():
        for grade in grades:
            if not _is_about_task(grade):
                return _judge_missing(f"{state}, graded several times,", grade) or unchecked("")
    graded = [grade for grades in states.values() for grade in grades]
    did = " and of ".join(f"{state}: {len(grades)}" for state, grades in states.items())
    return _result(Outcome.VALID, f"the grades agree, of {did}", graded)


def judge_exploit(tried: Mapping[str, Grade], notes: Sequence[str]) -> CheckResult:
    """Judge the grades of cheats by their names, none of which may pass. `notes` say what was not
    tried."""
    for name, grade in tried.items():
        if is_pass(grade):
            return _result(Outcome.INVALID, f"{name} passes", [grade])
    for name, grade in tried.items():
        if not _is_about_task(grade):
            return _judge_missing(name, grade) or unchecked("")
    said = "; ".join([f"none of {len(tried)} cheats passes: {', '.join(tried)}", *notes])
    return _result(Outcome.VALID, said, list(tried.values()))


def judge_reachable(solution: Solution, tools: Sequence[OfferedTool]) -> CheckResult:
    """Judge whether the solution's tools are offered."""
    offered = {tool.name for tool in tools}
    needed = list(dict.fromkeys(call.name for call in solution.calls))
    if missing := [name for name in needed if name not in offered]:
        detail = f"not offered: {', '.join(missing)}; offered: {', '.join(sorted(offered))}"
        return CheckResult(Outcome.INVALID, detail)
    return CheckResult(Outcome.VALID, f"offered: {', '.join(needed) or 'none is needed'}")


def judge_task(checks: Mapping[str, CheckResult]) -> Outcome:
    """Return the verdict on a task."""
    outcomes = {result.outcome for result in checks.values()}
    for outcome in (Outcome.INVALID, Outcome.ERROR, Outcome.TIMEOUT):
        if outcome in outcomes:
            return outcome
    return Outcome.VALID


def _is_about_task(grade: Grade) -> bool:
    """Return True if a grade, or its lack, follows from the task and what was done."""
    return grade.reward is not None or grade.verifier_fault or grade.no_grade == "no_verifier"


def _judge_missing(did: str, grade: Grade) -> CheckResult | None:
    """Judge a missing grade; None if it is there. A verifier that fails is the task's fault, and
    all else is not."""
    if grade.reward is not None:
        return None
    outcome = Outcome.TIMEOUT if grade.no_grade == "timeout" else Outcome.ERROR
    if _is_about_task(grade):
        outcome = Outcome.INVALID
    return _result(outcome, f"{did} has no grade: {grade.no_grade}: {grade.detail}", [grade])


def _result(outcome: Outcome, detail: str, grades: Sequence[Grade]) -> CheckResult:
    last = grades[-1]
    printed = "\n".join([*last.failed, last.printed]).strip()[:_PRINTED_CHARS]
    return CheckResult(outcome, detail, tuple(grade.reward for grade in grades), printed)
