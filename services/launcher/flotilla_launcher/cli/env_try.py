"""`flotilla env try`: plays one episode of a task by hand, or several tasks by a model, through a
gateway of its own."""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.tasks.task_files import TaskFileError, read_objects
from flotilla_common.text.printable_text import make_visible
from flotilla_launcher.cli.adapters.chosen_model import ChosenModel as ChosenModel
from flotilla_launcher.cli.adapters.gateway_player import PERSON_S, GatewayPlayer
from flotilla_launcher.cli.adapters.model_play import ModelPlay, play_tasks
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from flotilla_launcher.cli.command_runner import FAILED, OK, report_error
from flotilla_launcher.cli.standard_input import open_standard_input, read_line
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.cli.typed_calls import parse_call
from flotilla_launcher.config.backend_tables import backend_of
from flotilla_launcher.doctor.adapters.trial_episode import (
    NotOpenedError,
    backend_key,
    grade_episode,
    is_slow,
    keep_renewed,
    make_open_request,
    no_grade_name,
    open_episode,
    outcome_name,
    part_to_text,
    passes_wrongly,
    read_part,
    rpc_error_text,
    state_name,
    suggest_backend_fix,
    tool_schema,
)
from flotilla_launcher.doctor.dataset import env_key_of

_OPEN_S = 180.0
_CALL_S = 120.0
_GRADE_S = 300.0
_PASSED_UNTOUCHED = (
    "suspect  the task passes though nothing was done: is its verifier right, and does its server"
    " keep what earlier episodes wrote?"
)
_OVERRIDDEN = "warning  --answer replaces the answer of submit_final_answer in the grade"
_TO_BE_JUDGED = "to be judged: a run's [learner.judge] compares the attempts of a group"
_DESCRIPTION_CHARS = 200
_SUBMIT = "submit_final_answer"


def env_try(
    spec: Path,
    tasks: Path,
    key: str | None,
    answer: str | None,
    overrides: Sequence[str],
    play: ModelPlay | None = None,
) -> int:
    """Open an episode, make the calls from standard input, grade and close it; or have a model
    play the tasks."""
    if play and answer is not None:
        return report_error("--answer is for a play by hand: a model gives an answer of its own")
    console = Terminal(soft_wrap=True)
    # A shell ignores SIGINT for background jobs; the handlers below rely on it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for end in (signal.SIGTERM, signal.SIGHUP):
        # Same as Ctrl-C: this process must end the gateway, a process of its own.
        signal.signal(end, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return asyncio.run(_run(spec, _load_tasks(tasks, key), answer, overrides, play, console))
    except (CommandError, ConfigError) as error:
        return report_error(str(error))
    except grpc.aio.AioRpcError as error:
        return report_error(rpc_error_text(error))


def _load_tasks(path: Path, key: str | None) -> list[dict[str, Any]]:
    """Return the tasks of a file, or those called `key`. Raises CommandError if there is none."""
    try:
        tasks = read_objects(path)
    except TaskFileError as error:
        raise CommandError(str(error)) from error
    if not tasks:
        raise CommandError(f"{path} holds no task")
    found = [t for t in tasks if key is None or key in (t.get("key"), t.get("task_key"))]
    if not found:
        raise CommandError(f"{path}: none of its {len(tasks)} tasks has the key {key!r}")
    return found


async def _run(
    spec: Path,
    tasks: Sequence[dict[str, Any]],
    answer: str | None,
    overrides: Sequence[str],
    play: ModelPlay | None,
    console: Terminal,
) -> int:
    section = gateway_section(spec, overrides)
    console.print("starting a gateway", style="dim")
    async with open_gateway(spec, overrides) as stub:
        if play is not None:
            return await play_tasks(GatewayPlayer(stub, section, "env-try"), tasks, play, console)
        return await _play_by_hand(stub, section, tasks[0], answer, console)


async def _play_by_hand(
    stub: Any,
    section: Mapping[str, Any],
    task: dict[str, Any],
    answer: str | None,
    console: Terminal,
) -> int:
    request = make_open_request(task, "env-try")
    episode = await _open_with_progress(stub, section, task, request, console)
    try:
        _show_ready(episode.ready, console)
        messages = [{"role": "user", "content": episode.ready.facts.prompt}]
        async with running_tasks(_keep_renewed(stub, request.worker_id, episode, console)):
            calls = await _make_calls(stub, episode, answer, console)
            header = pb.GradeHeader(episode_id=episode.episode_id, final_answer=answer)
            messages += calls
            grade = await grade_episode(stub, header, messages, _GRADE_S, episode.ready)
        if not (calls or answer) and passes_wrongly(task, grade):
            console.print(_PASSED_UNTOUCHED)
        return _show_grade(grade, console)
    finally:
        closing = pb.CloseEpisodeRequest(episode_id=episode.episode_id)
        await stub.CloseEpisode(closing, timeout=_CALL_S)


async def _keep_renewed(
    stub: Any, worker_id: str, episode: pb.OpenEpisodeResponse, console: Terminal
) -> None:
    await keep_renewed(stub, worker_id, episode)
    console.print("the environment has ended, or the episode's time is over")


async def _open_with_progress(
    stub: Any,
    section: Mapping[str, Any],
    task: dict[str, Any],
    request: pb.OpenEpisodeRequest,
    console: Terminal,
) -> pb.OpenEpisodeResponse:
    """Open the episode and print its progress. Raises CommandError."""
    env_key = env_key_of(task)
    backend = backend_of(section, env_key) or "embedded"
    slow = is_slow(section, env_key)
    request.budget.FromSeconds(PERSON_S)
    try:
        return await open_episode(
            stub, request, limit_s=_OPEN_S, slow=slow, take_state=_make_state_printer(console)
        )
    except NotOpenedError as error:
        detail = str(error)
        fix = suggest_backend_fix(detail, backend_key(section, backend, detail))
        raise CommandError(f"cannot open the environment: {detail}; {fix}") from error


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
        console.print(f"shows    {part_to_text(part)}")
    for tool in ready.tools:
        names = ", ".join(make_visible(name, lines=False) for name in _argument_names(tool))
        description = "".join(tool.description.splitlines()[:1])[:_DESCRIPTION_CHARS]
        console.print(f"tool     {make_visible(tool.name, lines=False)}({names})  {description}")


def _argument_names(tool: pb.Tool) -> Sequence[str]:
    """Return the names of a tool's arguments; none if its schema does not list them."""
    properties = tool_schema(tool).get("properties")
    return tuple(properties) if isinstance(properties, dict) else ()


async def _make_calls(
    stub: Any, episode: pb.OpenEpisodeResponse, final_answer: str | None, console: Terminal
) -> list[dict[str, str]]:
    """Make the calls from standard input; return the conversation."""
    messages: list[dict[str, str]] = []
    if sys.stdin is not None and sys.stdin.isatty():
        console.print(
            '\nenter one call a line, such as  look {"at": "it"}  or  look at=it  ; Ctrl-D ends and'
            " grades"
        )
    number, episode_id = 0, episode.episode_id
    schemas = {tool.name: tool_schema(tool) for tool in episode.ready.tools}
    lines = open_standard_input()
    while line := await read_line(lines):
        call = parse_call(line, schemas)
        if call is None:
            console.print(f"not a call: {line}  (write a name, then a JSON object or NAME=VALUE)")
            continue
        request = pb.CallToolRequest(
            episode_id=episode_id,
            call_seq=number,
            name=call.name,
            arguments_json=call.arguments,
        )
        number += 1
        answer = await stub.CallTool(request, timeout=_CALL_S)
        texts = [await read_part(stub, episode_id, part) for part in answer.parts]
        console.print(f"{call.name}: {outcome_name(answer)}", *texts)
        messages += [
            {"role": "assistant", "content": line},
            {"role": "tool", "content": "\n".join(texts)},
        ]
        if answer.done:
            if final_answer is not None and call.name == _SUBMIT:
                console.print(_OVERRIDDEN)
            break
    return messages


def _show_grade(grade: pb.GradeResponse, console: Terminal) -> int:
    for check in grade.checks_passed:
        console.print(f"passed   {check}")
    for check in grade.checks_failed:
        console.print(f"failed   {check}")
    for name, value in sorted(grade.named_rewards.items()):
        console.print(f"named    {name} {value:g}")
    for line in grade.suspicion.splitlines():
        console.print(f"suspect  {line}")
    if grade.HasField("reward"):
        console.print(f"reward   {grade.reward:g}")
        return OK
    if grade.HasField("to_be_judged"):
        console.print(_TO_BE_JUDGED)
        return OK
    console.print(f"no grade {no_grade_name(grade)}: {grade.no_grade.detail}")
    return FAILED
