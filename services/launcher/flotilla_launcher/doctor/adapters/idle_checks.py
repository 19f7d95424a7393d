"""Checks of an environment by episodes in which the policy does nothing: a task must not pass, and
a second episode must be like the first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc.deadlines import loop_time
from flotilla_launcher.config.backend_tables import FLEET_BACKENDS, REPLAY
from flotilla_launcher.doctor.adapters.idle_episode import (
    IdleEpisode,
    play_idle_episode,
    short_reason,
)
from flotilla_launcher.doctor.adapters.trial_episode import no_grade_name, passes_wrongly
from flotilla_launcher.doctor.canaries import Canary
from flotilla_launcher.doctor.dataset import key_of
from flotilla_launcher.doctor.findings import Finding, FindingError, Status, fail, ok, warn
from flotilla_launcher.doctor.idle_comparison import (
    describe_difference,
    may_differ,
    shares_state,
    suggest_isolation,
)

# Further tasks of an environment are played only within this time.
_MORE_TASKS_S = 20.0
# Reasons that apply to every attempt; others may depend on what the attempt did.
_PERMANENT_REASONS = (
    pb.NO_GRADE_REASON_NO_VERIFIER,
    pb.NO_GRADE_REASON_INSTANCE_LOST,
    pb.NO_GRADE_REASON_TIMEOUT,
)


async def examine_environment(
    stub: Any, section: Mapping[str, Any], canaries: Sequence[Canary], opened: dict[str, bytes]
) -> list[Finding]:
    """Play the first task, then again unless an instance costs money, and then the others.
    `opened` receives the first episode's EpisodeReady."""
    first, until = canaries[0], loop_time() + _MORE_TASKS_S
    if first.backend == REPLAY:
        # It holds what its run did, which these episodes do not repeat.
        return [ok(f"{first.env_key}: a recorded run is replayed")]
    try:
        episode = await play_idle_episode(stub, section, first)
    except FindingError as error:
        return [error.finding]
    opened[first.env_key] = episode.ready.SerializeToString()
    if episode.grade.HasField("to_be_judged"):
        return [ok(f"{first.env_key}: its attempts are judged beside those of their group")]
    if not episode.grade.HasField("reward"):
        return [_explain_missing_grade(first.env_key, episode.grade)]
    findings = [ok(_describe_episode(first.env_key, episode))]
    if first.backend not in FLEET_BACKENDS:
        findings += await _compare_second(stub, section, first, episode)
    graded = [(first, episode)]
    for canary in canaries[1:]:
        if loop_time() > until:
            break
        other = await _play_graded(stub, section, canary)
        if isinstance(other, IdleEpisode):
            graded.append((canary, other))
        else:
            # The run goes on without the task.
            detail = f"task {key_of(canary.task)!r}: {other.detail}"
            findings.append(Finding(Status.WARN, detail))
    return [*findings, *_report_passed(section, graded)]


async def _compare_second(
    stub: Any, section: Mapping[str, Any], canary: Canary, first: IdleEpisode
) -> list[Finding]:
    second = await _play_graded(stub, section, canary)
    if not isinstance(second, IdleEpisode):
        return [replace(second, detail=f"in a second episode, {second.detail}")]
    difference = describe_difference(first.view(), second.view())
    if not difference:
        return []
    judge = warn if may_differ(section, canary.backend) else fail
    what = f"{canary.env_key}: a second episode of {key_of(canary.task)!r} differs: {difference}"
    return [judge(what, suggest_isolation(section, canary.backend))]


async def _play_graded(
    stub: Any, section: Mapping[str, Any], canary: Canary
) -> IdleEpisode | Finding:
    """Return the episode, or the finding if it cannot be played or graded."""
    try:
        episode = await play_idle_episode(stub, section, canary)
    except FindingError as error:
        return error.finding
    if episode.grade.HasField("reward"):
        return episode
    return _explain_missing_grade(canary.env_key, episode.grade)


def _report_passed(
    section: Mapping[str, Any], graded: Sequence[tuple[Canary, IdleEpisode]]
) -> list[Finding]:
    passed = [canary for canary, played in graded if passes_wrongly(canary.task, played.grade)]
    if not passed:
        return []
    env_key, backend = passed[0].env_key, passed[0].backend
    count = f"{len(passed)} of {len(graded)} tasks tried"
    what = f"{env_key}: {key_of(passed[0].task)!r} ({count}) passes though nothing was done"
    fix = (
        "correct its verifier or its data, and see whether its server keeps what earlier episodes"
        ' wrote; if doing nothing is right, give the task "passes_untouched": true'
    )
    judge = warn if shares_state(section, backend) else fail
    return [judge(what, fix)]


def _describe_episode(env_key: str, episode: IdleEpisode) -> str:
    names = sorted(tool.name for tool in episode.ready.tools)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    offered = f"{len(names)} tools ({shown})" if names else "single turn"
    return f"{env_key}: {offered}, doing nothing earns {episode.grade.reward:g}"


def _explain_missing_grade(env_key: str, grade: pb.GradeResponse) -> Finding:
    reason, detail = grade.no_grade.reason, grade.no_grade.detail
    what = f"{env_key}: no grade ({no_grade_name(grade)}): {short_reason(detail)}"
    if reason == pb.NO_GRADE_REASON_NO_VERIFIER:
        fix = (
            "correct its tasks' env_id, or give them verifier_func, "
            f"or set env_gateway.environments.{env_key}.verifier"
        )
        return fail(what, fix)
    if reason in _PERMANENT_REASONS or not grade.attempts:
        return fail(what, "`flotilla env try` repeats it by hand")
    fix = "if only attempts that act can be graded, have the verifier return 0 there"
    return warn(f"{what}, for an attempt that does nothing", fix)
