"""Probe that plays episodes of each environment in which nothing is done, at its own gateway."""

import asyncio
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.process.extras import install_command
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc import rpc
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.tasks.task_format import SINGLE_TURN
from flotilla_launcher.doctor.adapters.gateway_process import GatewayError, serve_gateway
from flotilla_launcher.doctor.adapters.idle_checks import examine_environment
from flotilla_launcher.doctor.adapters.idle_episode import short_reason
from flotilla_launcher.doctor.canaries import Canary, choose_canaries
from flotilla_launcher.doctor.canary_results import PlayedEpisodes, key_of_episodes
from flotilla_launcher.doctor.dataset import FLEET_OPENENV
from flotilla_launcher.doctor.findings import Finding, Status, fail, ok
from flotilla_launcher.doctor.prompts import UncountedError, check_prompts
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.doctor.server_starts import report_starts
from flotilla_launcher.doctor.tcp_ports import list_started, used_backends
from flotilla_launcher.security.service_variables import inherited_variables
from flotilla_launcher.state import GATEWAY, LEARNER

_CALL_S = 30.0
_CLOSED_S = 10.0
_AT_ONCE = 8
# Packages that the gateway imports and the launcher does not.
_PACKAGES = ("aiohttp", "PIL")
# Of the gateway itself: what a user's module lacks is another matter.
_NO_MODULE = re.compile(r"(?:error: )?ModuleNotFoundError: No module named '(\w+)")
_INSTALL_FIX = f"{install_command('env-gateway')}, or `make setup`"


async def probe_episodes(context: RunContext) -> list[Finding]:
    found, findings = await choose_canaries(context)
    played, keys = PlayedEpisodes(context.folder), {}
    due: dict[str, list[Canary]] = {}
    for env_key, canaries in found.items():
        key = keys[env_key] = key_of_episodes(context, canaries)
        at = played.played_at(key, time.time()) if key else None
        if at is None:
            due[env_key] = canaries
        else:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
            findings.append(ok(f"{env_key}: graded {day}, and nothing has changed since"))
    if not due:
        return findings
    opened: dict[str, bytes] = {}
    by_env = await _play_canaries(context, due, opened)
    reported = [*findings, *itertools.chain(*by_env.values())]
    single = frozenset(env for env in due if due[env][0].task.get("task_modality") == SINGLE_TURN)
    # Environments that cannot be played are left out: counting takes seconds.
    whole = {
        env: text
        for env, text in opened.items()
        if all(finding.status is not Status.FAIL for finding in by_env[env])
    }
    try:
        counted = await check_prompts(context, whole, single)
    except UncountedError:
        # The episodes are played again once their prompts can be counted.
        return reported
    if "" not in counted:
        judged = [(env, finding) for env in by_env for finding in by_env[env]]
        judged += counted.items()
        bad = {env for env, finding in judged if finding.status is not Status.OK}
        good = by_env.keys() - bad
        played.note_played([key for env in good if (key := keys.get(env))], time.time())
    return [*reported, *counted.values()]


async def _play_canaries(
    context: RunContext, due: Mapping[str, Sequence[Canary]], opened: dict[str, bytes]
) -> dict[str, list[Finding]]:
    """Return the findings of each environment's episodes; the key "" concerns all of them.
    `opened` receives an EpisodeReady of each that could be played."""
    command = python_command("-m", "flotilla_env_gateway", executable=_gateway_interpreter(context))
    lines: list[str] = []
    with scratch_folder() as (folder, _):
        spec = folder / "spec.json"
        spec.write_text(context.plan.text)
        try:
            async with serve_gateway(
                *(spec, (), lines.append),
                command=command,
                environ=context.environ,
                inherits=inherited_variables(context.plan, GATEWAY),
            ) as (address, token):
                section = context.get_section(GATEWAY)
                played = await _play_all(address, token, section, due, opened)
            starts = report_starts(section, context.get_section(LEARNER), lines)
            return {**played, "": [*played.get("", ()), *starts]}
        except GatewayError as error:
            return {"": [_explain_failed_start(short_reason(str(error)))]}


def _explain_failed_start(reason: str) -> Finding:
    if lacking := _NO_MODULE.match(reason):
        return fail(reason, f"install {lacking[1]}: {_INSTALL_FIX}")
    return fail(reason, "correct [env_gateway]")


def _gateway_interpreter(context: RunContext) -> str:
    """Return the gateway's interpreter. The launcher's own suffices if it has the gateway's
    packages, but not for processes that backends start. Raises UnprobedError."""
    used = used_backends(context)
    started = [key for key, _ in list_started(context.get_section(GATEWAY), used)]
    if FLEET_OPENENV in used:
        started.append(f"env_gateway.backends.{FLEET_OPENENV}")
    if context.python is None and started:
        raise context.make_unprobed_error(f"{started[0]} starts processes of its packages")
    return context.find_interpreter(*_PACKAGES)


async def _play_all(
    address: str,
    token: str,
    section: Mapping[str, Any],
    due: Mapping[str, Sequence[Canary]],
    ready: dict[str, bytes],
) -> dict[str, list[Finding]]:
    turn = asyncio.Semaphore(_AT_ONCE)
    async with rpc.channel(address, token=token) as channel:
        stub: Any = EpisodeServiceStub(channel)

        async def examine_one(canaries: Sequence[Canary]) -> list[Finding]:
            async with turn:
                return await examine_environment(stub, section, canaries, ready)

        findings = await asyncio.gather(*map(examine_one, due.values()))
        return {**dict(zip(due, findings, strict=True)), **await _check_leaks(stub)}


async def _check_leaks(stub: Any) -> dict[str, list[Finding]]:
    """Check that every instance that was created is closed again."""
    until = loop_time() + _CLOSED_S
    while True:
        status: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_S)
        left = status.instances_created - status.instances_closed
        if not left and not status.delete_backlog:
            return {}
        if loop_time() > until:
            what = f"{left} instances of these episodes may not be closed"
            return {"": [fail(what, "end them at the backend")]}
        await asyncio.sleep(0.1)
