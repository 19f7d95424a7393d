"""One canary episode of each environment, through a gateway of its own: which tools there are."""

import asyncio
import json
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from services.common import rpc
from services.launcher.adapters.gateway_process import GatewayError, gateway
from services.launcher.doctor.dataset import (
    FLEET_OPENENV,
    ChooseError,
    TaskFileError,
    chosen,
    comes_later,
    env_key_of,
    read_tasks,
    those_of,
)
from services.launcher.doctor.ports import used_backends
from services.launcher.doctor.results import (
    Finding,
    NotApplicableError,
    fail,
    first_line,
    ok,
)
from services.launcher.doctor.subject import Subject
from services.launcher.runs import GATEWAY, LEARNER

_OPEN_S = 120.0
_CALL_S = 30.0
_CLOSED_S = 10.0
_AT_ONCE = 4
# What the gateway imports besides what the launcher does.
_PACKAGES = ("aiohttp", "PIL")
# Episodes that have no tools: what the policy answers to the prompt is graded.
_SINGLE_TURN = "single_turn"
_BACKEND = "correct env_gateway.backends or the task; `flotilla env try` shows more"


async def tools(subject: Subject) -> list[Finding]:
    subject.section(GATEWAY)
    tasks = await _canaries(subject)
    command = (_interpreter(subject), "-m", "services.env_gateway")
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="flotilla-doctor-") as folder:
        spec = Path(folder) / "spec.json"
        spec.write_text(subject.plan.text)
        try:
            async with gateway(
                spec, (), lines.append, command=command, environ=subject.environ
            ) as (address, token):
                return await _all(address, token, tasks)
        except GatewayError as error:
            return [fail(_short(str(error)), "correct [env_gateway], or install what it lacks")]


def _interpreter(subject: Subject) -> str:
    """The gateway's own packages are enough for it, but not for what backends start beside it.
    Raises UnprobedError."""
    backends = subject.section(GATEWAY)["backends"]
    for name in sorted(used_backends(subject)) if subject.python is None else ():
        if name == FLEET_OPENENV or (backends.get(name) or {}).get("command"):
            raise subject.unprobed(f"env_gateway.backends.{name} starts processes of its packages")
    return subject.interpreter(*_PACKAGES)


async def _canaries(subject: Subject) -> dict[str, Mapping[str, Any]]:
    """Of the training tasks that the run uses, the first of each environment: an instance costs
    money, and so none is made of an environment that the run leaves alone."""
    section = subject.section(LEARNER)
    path = section["tasks"]
    if later := comes_later(subject, path):
        raise NotApplicableError(later)
    try:
        tasks = await asyncio.to_thread(read_tasks, Path(path))
        keys, wrong = (await chosen(subject, section, [path]))[path]
    except (TaskFileError, ChooseError) as error:
        raise NotApplicableError(f"there is no task to open: {error}") from error
    if wrong:
        raise NotApplicableError(f"there is no task to open: {wrong}")
    found: dict[str, Mapping[str, Any]] = {}
    for task in those_of(tasks, keys):
        found.setdefault(env_key_of(task), task)
    return found


async def _all(address: str, token: str, tasks: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    turn = asyncio.Semaphore(_AT_ONCE)
    async with rpc.channel(address, token=token) as channel:
        stub: Any = EpisodeServiceStub(channel)

        async def one(env_key: str, task: Mapping[str, Any]) -> Finding:
            async with turn:
                return await _canary(stub, env_key, task)

        findings = await asyncio.gather(*(one(*item) for item in sorted(tasks.items())))
        return [*findings, *await _leaks(stub)]


async def _canary(stub: Any, env_key: str, task: Mapping[str, Any]) -> Finding:
    request = pb.OpenEpisodeRequest(
        request_id=uuid.uuid4().hex,
        run_id="doctor",
        group_id=f"doctor-{env_key}",
        opening=1,
        task_json=json.dumps(task),
        worker_id="flotilla-doctor",
    )
    last = pb.OpenEpisodeResponse()
    try:
        async for state in stub.OpenEpisode(request, timeout=_OPEN_S):
            last = state
        if last.state != pb.EPISODE_STATE_READY:
            return fail(f"{env_key} cannot be opened: {_short(last.detail)}", _BACKEND)
        return _judged(env_key, task, last.ready)
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        said = known.message if known else f"{error.code().name}: {error.details()}"
        return fail(f"{env_key} cannot be opened: {_short(said)}", _BACKEND)
    finally:
        if last.episode_id:
            closing = pb.CloseEpisodeRequest(episode_id=last.episode_id)
            await stub.CloseEpisode(closing, timeout=_CALL_S)


def _judged(env_key: str, task: Mapping[str, Any], ready: pb.EpisodeReady) -> Finding:
    names = sorted(tool.name for tool in ready.tools)
    if not names and task.get("task_modality") != _SINGLE_TURN:
        fix = "see whether the environment's MCP server is up, or correct task_modality"
        return fail(f"{env_key} offers no tool", fix)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return ok(f"{env_key}: {len(names)} tools ({shown})" if names else f"{env_key}: single turn")


async def _leaks(stub: Any) -> list[Finding]:
    """Whether every instance that was made is closed again."""
    until = asyncio.get_running_loop().time() + _CLOSED_S
    while True:
        status: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_S)
        left = status.instances_created - status.instances_closed
        if not left and not status.delete_backlog:
            return []
        if asyncio.get_running_loop().time() > until:
            return [fail(f"{left} canary instances may not be closed", "end them at the backend")]
        await asyncio.sleep(0.1)


def _short(text: str) -> str:
    """The last line that says something: a gateway's log ends with what ended it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return first_line(lines[-1] if lines else text, 500)
