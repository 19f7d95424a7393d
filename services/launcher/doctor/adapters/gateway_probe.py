"""Probe that opens and grades one episode of each environment, through a gateway of its own."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from services.common import rpc
from services.common.deadlines import loop_time
from services.common.python_command import python_command
from services.common.scratch_folders import scratch_folder
from services.launcher.doctor.adapters.gateway_process import GatewayError, serve_gateway
from services.launcher.doctor.adapters.trial_episode import (
    NotOpenedError,
    grade_episode,
    is_slow,
    make_open_request,
    no_grade_name,
    open_episode,
    rpc_error_text,
    suggest_backend_fix,
)
from services.launcher.doctor.canaries import Canary, choose_canaries
from services.launcher.doctor.canary_results import PlayedEpisodes, key_of_episode
from services.launcher.doctor.dataset import FLEET_OPENENV
from services.launcher.doctor.findings import Finding, Status, fail, last_line, ok, warn
from services.launcher.doctor.prompts import UncountedError, check_prompts
from services.launcher.doctor.run_context import RunContext
from services.launcher.doctor.tcp_ports import used_backends
from services.launcher.security.env_filter import inherited_variables
from services.launcher.state import GATEWAY

_CALL_S = 30.0
# Added to the time that one run of a verifier may take.
_GRADE_MARGIN_S = 5.0
_CLOSED_S = 10.0
_AT_ONCE = 8
# Packages that the gateway imports and the launcher does not.
_PACKAGES = ("aiohttp", "PIL")
_NO_MODULE = re.compile(r"No module named '(\w+)")
_INSTALL_FIX = "pip install 'flotilla[env-gateway]', or `make setup`"
# Modality of episodes without tools, which grade the policy's answer to the prompt.
_SINGLE_TURN = "single_turn"
# Reasons that apply to every attempt; others may depend on what the attempt did.
_PERMANENT_REASONS = (
    pb.NO_GRADE_REASON_NO_VERIFIER,
    pb.NO_GRADE_REASON_INSTANCE_LOST,
    pb.NO_GRADE_REASON_TIMEOUT,
)


async def probe_episodes(context: RunContext) -> list[Finding]:
    found, findings = await choose_canaries(context)
    played, keys = PlayedEpisodes(context.folder), {}
    due: list[Canary] = []
    for canary in found:
        key = keys[canary.env_key] = key_of_episode(context, canary)
        at = played.played_at(key, time.time()) if key else None
        if at is None:
            due.append(canary)
        else:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
            findings.append(ok(f"{canary.env_key}: graded {day}, and nothing has changed since"))
    if not due:
        return findings
    opened: dict[str, bytes] = {}
    by_env = await _play_canaries(context, due, opened)
    single = frozenset(c.env_key for c in due if c.task.get("task_modality") == _SINGLE_TURN)
    # Environments that cannot be played are left out: counting takes seconds.
    whole = {env: text for env, text in opened.items() if by_env[env].status is not Status.FAIL}
    try:
        counted = await check_prompts(context, whole, single)
    except UncountedError:
        # The episodes are played again once their prompts can be counted.
        return [*findings, *by_env.values()]
    judged = [*by_env.items(), *counted.items()]
    bad = {env for env, finding in judged if finding.status is not Status.OK}
    good = set(by_env) - bad if "" not in counted else set[str]()
    played.note_played([key for env in good if (key := keys.get(env))], time.time())
    return [*findings, *by_env.values(), *counted.values()]


async def _play_canaries(
    context: RunContext, due: Sequence[Canary], opened: dict[str, bytes]
) -> dict[str, Finding]:
    """Return the finding of each environment's episode; the key "" concerns all of them.
    `opened` receives the EpisodeReady of each that could be played."""
    command = python_command("-m", "services.env_gateway", executable=_gateway_interpreter(context))
    lines: list[str] = []
    with scratch_folder() as (folder, _):
        spec = folder / "spec.json"
        spec.write_text(context.plan.text)
        try:
            async with serve_gateway(
                *(spec, (), lines.append),
                command=command,
                environ=context.environ,
                inherits=inherited_variables(context.plan.spec, context.plan.config, GATEWAY),
            ) as (address, token):
                return await _play_all(address, token, context.get_section(GATEWAY), due, opened)
        except GatewayError as error:
            return {"": _explain_failed_start(_last_line(str(error)))}


def _explain_failed_start(reason: str) -> Finding:
    if lacking := _NO_MODULE.search(reason):
        return fail(reason, f"install {lacking[1]}: {_INSTALL_FIX}")
    return fail(reason, "correct [env_gateway]")


def _gateway_interpreter(context: RunContext) -> str:
    """Return the gateway's interpreter. The launcher's own suffices if it has the gateway's
    packages, but not for processes that backends start. Raises UnprobedError."""
    backends = context.get_section(GATEWAY)["backends"]
    for name in sorted(used_backends(context)) if context.python is None else ():
        if name == FLEET_OPENENV or (backends.get(name) or {}).get("command"):
            raise context.make_unprobed_error(
                f"env_gateway.backends.{name} starts processes of its packages"
            )
    return context.find_interpreter(*_PACKAGES)


async def _play_all(
    address: str,
    token: str,
    section: Mapping[str, Any],
    due: Sequence[Canary],
    ready: dict[str, bytes],
) -> dict[str, Finding]:
    turn = asyncio.Semaphore(_AT_ONCE)
    async with rpc.channel(address, token=token) as channel:
        stub: Any = EpisodeServiceStub(channel)

        async def play_one(canary: Canary) -> Finding:
            async with turn:
                return await _play_canary(stub, section, canary, ready)

        findings = await asyncio.gather(*map(play_one, due))
        by_env = {canary.env_key: finding for canary, finding in zip(due, findings, strict=True)}
        return {**by_env, **await _check_leaks(stub)}


async def _play_canary(
    stub: Any, section: Mapping[str, Any], canary: Canary, ready: dict[str, bytes]
) -> Finding:
    """Open, grade and close an episode in which the policy does nothing."""
    env_key, where = canary.env_key, f"env_gateway.backends.{canary.backend}"
    slow, limit_s = is_slow(section, env_key), float(section["open_timeout_s"])
    request = make_open_request(canary.task, "doctor")
    try:
        last = await open_episode(stub, request, limit_s=limit_s, slow=slow)
    except NotOpenedError as error:
        reason = _last_line(str(error))
        return fail(f"{env_key} cannot be opened: {reason}", suggest_backend_fix(reason, where))
    try:
        finding = _check_tools(env_key, canary.task, last.ready)
        if finding.status is not Status.OK:
            return finding
        ready[env_key] = last.ready.SerializeToString()
        grade_s = float(section["verifiers"]["timeout_s"]) + _GRADE_MARGIN_S
        return _judge_grade(env_key, finding, await _grade_idle_episode(stub, last, grade_s))
    except grpc.aio.AioRpcError as error:
        reason = rpc_error_text(error)
        return fail(
            f"{env_key} cannot be graded: {_last_line(reason)}", suggest_backend_fix(reason, where)
        )
    finally:
        closing = pb.CloseEpisodeRequest(episode_id=last.episode_id)
        await stub.CloseEpisode(closing, timeout=_CALL_S)


def _check_tools(env_key: str, task: Mapping[str, Any], ready: pb.EpisodeReady) -> Finding:
    names = sorted(tool.name for tool in ready.tools)
    if not names and task.get("task_modality") != _SINGLE_TURN:
        fix = "check that the environment's MCP server is up, or correct task_modality"
        return fail(f"{env_key} offers no tool", fix)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return ok(f"{env_key}: {len(names)} tools ({shown})" if names else f"{env_key}: single turn")


async def _grade_idle_episode(
    stub: Any, last: pb.OpenEpisodeResponse, limit_s: float
) -> pb.GradeResponse:
    header = pb.GradeHeader(
        episode_id=last.episode_id, final_answer="", deadline=rpc.to_duration(limit_s)
    )
    messages = [
        {"role": "user", "content": last.ready.facts.prompt},
        {"role": "assistant", "content": ""},
    ]
    return await grade_episode(stub, header, messages, limit_s + _GRADE_MARGIN_S)


def _judge_grade(env_key: str, offered: Finding, grade: pb.GradeResponse) -> Finding:
    if grade.HasField("reward"):
        return ok(f"{offered.detail}, doing nothing earns {grade.reward:g}")
    reason, detail = grade.no_grade.reason, grade.no_grade.detail
    what = f"{env_key}: no grade ({no_grade_name(grade)}): {_last_line(detail)}"
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


async def _check_leaks(stub: Any) -> dict[str, Finding]:
    """Check that every instance that was created is closed again."""
    until = loop_time() + _CLOSED_S
    while True:
        status: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_S)
        left = status.instances_created - status.instances_closed
        if not left and not status.delete_backlog:
            return {}
        if loop_time() > until:
            what = f"{left} instances of these episodes may not be closed"
            return {"": fail(what, "end them at the backend")}
        await asyncio.sleep(0.1)


def _last_line(text: str) -> str:
    """Return the last line that is not blank: a gateway's log ends with the cause of its end."""
    return last_line(text, 800)
