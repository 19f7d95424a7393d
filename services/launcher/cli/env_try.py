"""`flotilla env try`: plays one episode of a task by hand, through a gateway of its own."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from services.common import rpc
from services.common.concurrency import running_tasks
from services.common.config import load_spec
from services.common.errors import ConfigError
from services.common.printable_text import make_visible, print_visible
from services.launcher.cli.command_runner import FAILED, OK, report_error
from services.launcher.cli.standard_input import open_standard_input, read_line
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.config.launcher import parse_launcher
from services.launcher.doctor.adapters.gateway_process import GatewayError, serve_gateway
from services.launcher.doctor.adapters.trial_episode import (
    NotOpenedError,
    backend_key,
    grade_episode,
    is_slow,
    make_open_request,
    no_grade_name,
    open_episode,
    rpc_error_text,
    state_name,
    suggest_backend_fix,
)
from services.launcher.doctor.dataset import env_key_of
from services.launcher.security.env_filter import inherited_variables
from services.launcher.state import GATEWAY

_OPEN_S = 180.0
_CALL_S = 120.0
_GRADE_S = 300.0
# Longest content of a transcript message, which must fit into one gRPC message.
_MESSAGE_CHARS = 100_000
_PASSED = 1.0
_PASSED_UNTOUCHED = (
    "suspect  the task passes though nothing was done: is its verifier right, and does its server"
    " keep what earlier episodes wrote?"
)
_OVERRIDDEN = "warning  --answer replaces the answer of submit_final_answer in the grade"
_WHO = "env-try"
# What a gateway's spec must hold, and no gateway uses.
_UNUSED = {"name": '"by-hand"', "policy": '{model = "none", max_model_len = 1}'}
_RENEW_S = 5.0
_DAY_S = 86_400
_DESCRIPTION_CHARS = 200
_SUBMIT = "submit_final_answer"
_CALL_PATTERN = re.compile(r"(?P<name>[^\s{]+)\s*(?P<arguments>\{.*\})?\s*", re.DOTALL)


def env_try(
    spec: Path, tasks: Path, key: str | None, answer: str | None, overrides: Sequence[str]
) -> int:
    """Open an episode, make the calls from standard input, grade and close it."""
    console = Terminal(soft_wrap=True)
    # A shell ignores SIGINT for background jobs; the handlers below rely on it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for end in (signal.SIGTERM, signal.SIGHUP):
        # Same as Ctrl-C: this process must end the gateway, a process of its own.
        signal.signal(end, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        task = load_task(tasks, key)
        return asyncio.run(_play_episode(spec, task, answer, overrides, console))
    except (CommandError, GatewayError, ConfigError) as error:
        return report_error(str(error))
    except grpc.aio.AioRpcError as error:
        return report_error(rpc_error_text(error))


def load_task(path: Path, key: str | None) -> dict[str, Any]:
    """Return the task called `key` of a task file, else its first. Raises CommandError."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error
    tasks = content.get("tasks", [content]) if isinstance(content, dict) else content
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise CommandError(f'{path}: expected a task, a list of tasks or {{"tasks": [...]}}')
    found = [t for t in tasks if key is None or key in (t.get("key"), t.get("task_key"))]
    if not found:
        raise CommandError(f"{path}: no task {key!r} among {len(tasks)}")
    return cast("dict[str, Any]", found[0])


async def _play_episode(
    spec: Path,
    task: dict[str, Any],
    answer: str | None,
    overrides: Sequence[str],
    console: Terminal,
) -> int:
    given = load_spec(spec, overrides)
    unset = [f"--{key}={_UNUSED[key]}" for key in _UNUSED if key not in given]
    overrides, section = [*overrides, *unset], given.get(GATEWAY, {})
    inherits = inherited_variables(given, parse_launcher(given, where=str(spec)), GATEWAY)
    console.print("starting a gateway", style="dim")
    async with (
        serve_gateway(spec, overrides, _show_warning, inherits=inherits) as (address, token),
        rpc.channel(address, token=token) as channel,
    ):
        stub: Any = EpisodeServiceStub(channel)
        episode = await _open_with_progress(stub, section, task, console)
        try:
            show_ready(episode.ready, console)
            messages = [_make_message("user", episode.ready.facts.prompt)]
            async with running_tasks(keep_renewed(stub, episode, console)):
                calls = await _make_calls(stub, episode.episode_id, answer, console)
                header = pb.GradeHeader(episode_id=episode.episode_id, final_answer=answer)
                grade = await grade_episode(stub, header, [*messages, *calls], _GRADE_S)
            if not (calls or answer or task.get("passes_untouched")) and grade.reward >= _PASSED:
                console.print(_PASSED_UNTOUCHED)
            return _show_grade(grade, console)
        finally:
            request = pb.CloseEpisodeRequest(episode_id=episode.episode_id)
            await stub.CloseEpisode(request, timeout=_CALL_S)


async def keep_renewed(stub: Any, episode: pb.OpenEpisodeResponse, console: Terminal) -> None:
    """Renew the episode's lease until it is lost: a person thinks for minutes. Never raises."""
    ttl_s = episode.ready.lease_ttl.ToTimedelta().total_seconds()
    request = pb.RenewEpisodesRequest(
        worker_id=f"flotilla-{_WHO}", episode_ids=[episode.episode_id]
    )
    while True:
        await asyncio.sleep(ttl_s / 3)
        # The next round retries, and the next call shows an episode that expires meanwhile.
        with suppress(grpc.aio.AioRpcError):
            answer = await stub.RenewEpisodes(request, timeout=_RENEW_S)
            if answer.lost_episode_ids:
                console.print("the environment has ended, or the episode's time is over")
                return


def _show_warning(line: str) -> None:
    """Print the gateway's warnings and errors; skip its other log lines."""
    if '"level": "info"' not in line:
        print_visible(line, file=sys.stderr)


async def _open_with_progress(
    stub: Any, section: Mapping[str, Any], task: dict[str, Any], console: Terminal
) -> pb.OpenEpisodeResponse:
    """Open the episode and print its progress. Raises CommandError."""
    env_key = env_key_of(task)
    own = section.get("environments", {}).get(env_key, {})
    where = backend_key(section, own.get("backend") or section.get("backend", "embedded"))
    slow, request = is_slow(section, env_key), make_open_request(task, _WHO)
    # A person takes long; the gateway takes the most that it allows.
    request.budget.FromSeconds(_DAY_S)
    try:
        return await open_episode(
            stub, request, limit_s=_OPEN_S, slow=slow, take_state=_make_state_printer(console)
        )
    except NotOpenedError as error:
        what = f"cannot open the environment: {error}"
        raise CommandError(f"{what}; {suggest_backend_fix(str(error), where)}") from error


def _make_state_printer(console: Terminal) -> Callable[[pb.OpenEpisodeResponse], None]:
    def print_state(response: pb.OpenEpisodeResponse) -> None:
        trying = f": {response.detail}, trying again" if response.detail else ""
        if response.state != pb.EPISODE_STATE_FAILED:
            console.print(f"{state_name(response)}{trying}", style="dim")

    return print_state


def show_ready(ready: pb.EpisodeReady, console: Terminal) -> None:
    console.print(f"instance {ready.instance_id}, opened in {ready.open_time.ToTimedelta()}")
    console.print(f"prompt   {ready.facts.prompt}")
    for part in ready.initial_observation:
        console.print(f"shows    {_part_to_text(part)}")
    for tool in ready.tools:
        names = ", ".join(make_visible(name, lines=False) for name in _argument_names(tool))
        description = "".join(tool.description.splitlines()[:1])[:_DESCRIPTION_CHARS]
        console.print(f"tool     {make_visible(tool.name, lines=False)}({names})  {description}")


def _argument_names(tool: pb.Tool) -> Sequence[str]:
    """Return the names of a tool's arguments; none if its schema is not of an object."""
    try:
        schema = json.loads(tool.input_schema_json or "{}")
    except (ValueError, RecursionError):
        return ()
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return tuple(properties) if isinstance(properties, dict) else ()


async def _make_calls(
    stub: Any, episode_id: str, final_answer: str | None, console: Terminal
) -> list[dict[str, str]]:
    """Make the calls from standard input; return the conversation."""
    messages: list[dict[str, str]] = []
    if sys.stdin is not None and sys.stdin.isatty():
        console.print(
            '\nenter one call a line, such as  look {"at": "it"}  ; Ctrl-D ends and grades'
        )
    number = 0
    lines = open_standard_input()
    while line := await read_line(lines):
        match = _CALL_PATTERN.fullmatch(line)
        if match is None:
            console.print(f"not a call: {line}  (write a name, then a JSON object)")
            continue
        request = pb.CallToolRequest(
            episode_id=episode_id,
            call_seq=number,
            name=match["name"],
            arguments_json=match["arguments"] or "{}",
        )
        number += 1
        answer = await stub.CallTool(request, timeout=_CALL_S)
        outcome = pb.ToolOutcome.Name(answer.outcome).removeprefix("TOOL_OUTCOME_").lower()
        texts = [_part_to_text(part) for part in answer.parts]
        console.print(f"{match['name']}: {outcome}", *texts)
        messages += [_make_message("assistant", line), _make_message("tool", "\n".join(texts))]
        if answer.done:
            if final_answer is not None and match["name"] == _SUBMIT:
                console.print(_OVERRIDDEN)
            break
    return messages


def _show_grade(grade: pb.GradeResponse, console: Terminal) -> int:
    for check in grade.checks_passed:
        console.print(f"passed   {check}")
    for check in grade.checks_failed:
        console.print(f"failed   {check}")
    for line in grade.suspicion.splitlines():
        console.print(f"suspect  {line}")
    if grade.HasField("reward"):
        console.print(f"reward   {grade.reward:g}")
        return OK
    console.print(f"no grade {no_grade_name(grade)}: {grade.no_grade.detail}")
    return FAILED


def _make_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content[:_MESSAGE_CHARS]}


def _part_to_text(part: pb.ContentPart) -> str:
    if part.HasField("text"):
        return part.text
    media = part.media
    return f"[{media.mime}, {media.size_bytes} bytes, {media.width}x{media.height}]"
