"""`flotilla env try`: plays one episode of a task by hand, through a gateway of its own."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from services.common import rpc
from services.common.config import load_spec
from services.common.errors import ConfigError
from services.common.printable_text import print_visible
from services.launcher.cli.command_runner import FAILED, OK, report_error
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.config.launcher import parse_launcher
from services.launcher.doctor.adapters.gateway_process import GatewayError, serve_gateway
from services.launcher.doctor.adapters.trial_episode import (
    NotOpenedError,
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
_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_CALL_PATTERN = re.compile(r"(?P<name>[^\s{]+)\s*(?P<arguments>\{.*\})?\s*", re.DOTALL)


class TryError(CommandError):
    """Raised when the episode cannot be played; the message states the cause."""


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
    except (TryError, GatewayError, ConfigError) as error:
        return report_error(str(error))
    except grpc.aio.AioRpcError as error:
        return report_error(rpc_error_text(error))


def load_task(path: Path, key: str | None) -> dict[str, Any]:
    """Return the task called `key` of a task file, else its first. Raises TryError."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TryError(f"{path}: {error}") from error
    tasks = content.get("tasks", [content]) if isinstance(content, dict) else content
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise TryError(f'{path}: expected a task, a list of tasks or {{"tasks": [...]}}')
    found = [t for t in tasks if key is None or key in (t.get("key"), t.get("task_key"))]
    if not found:
        raise TryError(f"{path}: no task {key!r} among {len(tasks)}")
    return cast("dict[str, Any]", found[0])


async def _play_episode(
    spec: Path,
    task: dict[str, Any],
    answer: str | None,
    overrides: Sequence[str],
    console: Terminal,
) -> int:
    given = load_spec(spec, overrides)
    section = given.get(GATEWAY, {})
    inherits = inherited_variables(given, parse_launcher(given, where=str(spec)), GATEWAY)
    console.print("starting a gateway", style="dim")
    async with (
        serve_gateway(spec, overrides, _show_warning, inherits=inherits) as (address, token),
        rpc.channel(address, token=token) as channel,
    ):
        stub: Any = EpisodeServiceStub(channel)
        episode = await _open_with_progress(stub, section, task, console)
        try:
            _show_ready(episode.ready, console)
            messages = [_make_message("user", episode.ready.facts.prompt)]
            calls = await _make_calls(stub, episode.episode_id, console)
            header = pb.GradeHeader(episode_id=episode.episode_id, final_answer=answer)
            grade = await grade_episode(stub, header, [*messages, *calls], _GRADE_S)
            if not (calls or answer or task.get("passes_untouched")) and grade.reward >= _PASSED:
                console.print(_PASSED_UNTOUCHED)
            return _show_grade(grade, console)
        finally:
            request = pb.CloseEpisodeRequest(episode_id=episode.episode_id)
            await stub.CloseEpisode(request, timeout=_CALL_S)


def _show_warning(line: str) -> None:
    """Print the gateway's warnings and errors; skip its other log lines."""
    if '"level": "info"' not in line:
        print_visible(line, file=sys.stderr)


async def _open_with_progress(
    stub: Any, section: Mapping[str, Any], task: dict[str, Any], console: Terminal
) -> pb.OpenEpisodeResponse:
    """Open the episode and print its progress. Raises TryError."""
    env_key = env_key_of(task)
    own = section.get("environments", {}).get(env_key, {})
    where = f"env_gateway.backends.{own.get('backend') or section.get('backend', 'embedded')}"
    slow, request = is_slow(section, env_key), make_open_request(task, "env-try")
    try:
        return await open_episode(
            stub, request, limit_s=_OPEN_S, slow=slow, take_state=_make_state_printer(console)
        )
    except NotOpenedError as error:
        what = f"cannot open the environment: {error}"
        raise TryError(f"{what}; {suggest_backend_fix(str(error), where)}") from error


def _make_state_printer(console: Terminal) -> Callable[[pb.OpenEpisodeResponse], None]:
    def print_state(response: pb.OpenEpisodeResponse) -> None:
        trying = f": {response.detail}, trying again" if response.detail else ""
        if response.state != pb.EPISODE_STATE_FAILED:
            console.print(f"{state_name(response)}{trying}", style="dim")

    return print_state


def _show_ready(ready: pb.EpisodeReady, console: Terminal) -> None:
    console.print(f"instance {ready.instance_id}, opened in {ready.open_time.ToTimedelta()}")
    console.print(f"prompt   {ready.facts.prompt}")
    for part in ready.initial_observation:
        console.print(f"shows    {_part_to_text(part)}")
    for tool in ready.tools:
        schema = json.loads(tool.input_schema_json or "{}")
        arguments = ", ".join(schema.get("properties", {}))
        description = tool.description.splitlines()[:1]
        console.print(f"tool     {tool.name}({arguments})  {''.join(description)}")


async def _make_calls(stub: Any, episode_id: str, console: Terminal) -> list[dict[str, str]]:
    """Make the calls from standard input; return the conversation."""
    messages: list[dict[str, str]] = []
    if sys.stdin is not None and sys.stdin.isatty():
        console.print(
            '\nenter one call a line, such as  look {"at": "it"}  ; Ctrl-D ends and grades'
        )
    number = 0
    lines = _standard_input()
    while line := await _read_line(lines):
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
            break
    return messages


def _standard_input() -> asyncio.StreamReader:
    """Return standard input as a stream. A daemon thread reads it and is never joined: at a
    terminal, the read blocks until a line is typed. It reads unbuffered, because it would keep
    the buffer's lock."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    if sys.stdin is None:
        lines.feed_eof()
        return lines
    source = sys.stdin.fileno()

    def read_input() -> None:
        # The loop is closed if the episode ends before its input.
        with suppress(RuntimeError):
            while chunk := _read_chunk(source):
                loop.call_soon_threadsafe(lines.feed_data, chunk)
            loop.call_soon_threadsafe(lines.feed_eof)

    threading.Thread(target=read_input, name="standard input", daemon=True).start()
    return lines


def _read_chunk(source: int) -> bytes:
    """Read the available input; b"" at the end. A closed terminal reports its end as an error."""
    try:
        return os.read(source, _CHUNK_BYTES)
    except OSError:
        return b""


async def _read_line(lines: asyncio.StreamReader) -> str:
    """Return the next non-empty line; "" at the end. Raises TryError."""
    try:
        while line := await lines.readline():
            if text := line.decode("utf-8", "replace").strip():
                return text
    except ValueError as error:
        raise TryError(f"a call is longer than {_LINE_BYTES} bytes") from error
    return ""


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
