"""`flotilla data play`: demonstrations that a person plays, as a file for `flotilla sft --from`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.tasks.task_files import ReadTask, accept_rows, parse_rows, read_bytes
from flotilla_launcher.cli.adapters.chat_conversation import show_grade, show_tools
from flotilla_launcher.cli.adapters.gateway_player import PERSON_S, GatewayPlayer
from flotilla_launcher.cli.adapters.model_attempts import offer_tool, tell_result
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from flotilla_launcher.cli.command_runner import BAD_SPEC, reports_errors, run_until_interrupted
from flotilla_launcher.cli.data_views import reports_data_errors
from flotilla_launcher.cli.standard_input import open_standard_input, read_line
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.cli.typed_calls import TypedCall, parse_call
from flotilla_reading.data.collect.demonstrations_file import DemonstrationsFile, demonstration_row
from flotilla_reading.play.ports import OpenEpisode, PlayError

_HELP = (
    'calls are lines such as  look {"at": "it"}  or  look at=it  ; /done TEXT ends with the answer'
    " TEXT and grades, /reset opens the task again, /skip leaves it, /tools lists the tools, /quit"
    " ends"
)
_NO_UNDO = "a call cannot be taken back, since its environment has changed; /reset opens it again"
# The call reached no tool.
_REFUSED = ("bad_tool", "bad_arguments")
_AGAIN, _NEXT, _END = "again", "next", "end"


@dataclass(frozen=True, slots=True)
class HandPlay:
    """Which tasks are played at the environments of which spec, and the file that keeps them."""

    spec: Path
    overrides: Sequence[str]
    tasks: Path
    key: str
    out: Path


@reports_errors(bad_spec=BAD_SPEC)
@reports_data_errors
def play_tasks(wish: HandPlay) -> int:
    """Play the tasks that the file lacks, one after another; return the exit code."""
    read = accept_rows(parse_rows(read_bytes(wish.tasks), wish.tasks), wish.tasks)
    tasks = [task for task in read if wish.key in ("", task.task.key)]
    if not tasks:
        raise CommandError(
            f"{wish.tasks} has no task {wish.key!r}: `flotilla data show` lists them"
        )
    kept = DemonstrationsFile(wish.out)
    console = Terminal(soft_wrap=True)
    left = [task for task in tasks if task.task.key not in kept.keys]
    if done := len(tasks) - len(left):
        console.print(f"{wish.out} has {done} of {len(tasks)} tasks, which are not played again")
    if not left:
        return 0
    return run_until_interrupted(_play(wish, left, kept, console))


async def _play(
    wish: HandPlay, tasks: Sequence[ReadTask], kept: DemonstrationsFile, console: Terminal
) -> None:
    section = gateway_section(wish.spec, wish.overrides)
    console.print("starting a gateway", style="dim")
    async with open_gateway(wish.spec, wish.overrides) as stub:
        console.print(_HELP)
        player, lines = GatewayPlayer(stub, section, "data-play", PERSON_S), open_standard_input()
        for number, task in enumerate(tasks, start=1):
            next_step = _AGAIN
            while next_step == _AGAIN:
                console.print(f"task     {task.task.key} ({number} of {len(tasks)})")
                try:
                    async with player.open_episode(task.fields) as episode:
                        next_step = await _HandPlayed(task, episode, kept, console).play(lines)
                except PlayError as error:
                    raise CommandError(f"{error}; the same command goes on") from error
            if next_step == _END:
                return


class _HandPlayed:
    """One task as it is played."""

    def __init__(
        self, task: ReadTask, episode: OpenEpisode, kept: DemonstrationsFile, console: Terminal
    ) -> None:
        self._key = task.task.key
        self._episode = episode
        self._kept = kept
        self._console = console
        self._schemas = {tool.name: tool.schema for tool in episode.opening.tools}
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": episode.opening.task}]
        self._over = False

    async def play(self, lines: asyncio.StreamReader) -> str:
        """Carry out the user's lines; return what to do next. Raises CommandError, PlayError."""
        self._console.print(f"prompt   {self._episode.opening.task}")
        show_tools(self._episode.opening.tools, self._console)
        while line := await read_line(lines):
            word, _, rest = line.partition(" ")
            if word == "/done":
                return await self._end(rest.strip())
            if word in _STEPS:
                return _STEPS[word]
            if word == "/undo":
                self._console.print(_NO_UNDO)
            elif word == "/tools":
                show_tools(self._episode.opening.tools, self._console)
            elif line.startswith("/"):
                self._console.print(f"there is no {word}: {_HELP}")
            elif self._over:
                self._console.print("the environment has ended the episode: /done grades it")
            elif call := parse_call(line, self._schemas):
                await self._make_call(call)
            else:
                self._console.print(f"not a call: {line}  ({_HELP})")
        return _END

    async def _make_call(self, call: TypedCall) -> None:
        """Make a call; one that reached no tool is a slip, and no part of the demonstration."""
        result = await self._episode.call_tool(call.name, call.arguments)
        self._console.print(f"{call.name}: {result.outcome}", result.text)
        if result.outcome in _REFUSED:
            return
        self._over = result.done
        call_id = f"call-{len(self._messages)}"
        function = {"name": call.name, "arguments": call.arguments}
        made = {"id": call_id, "type": "function", "function": function}
        self._messages += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call_id, "content": tell_result(result)},
        ]

    async def _end(self, answer: str) -> str:
        """Grade the episode, and keep it if it passes; return what to do next."""
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        grade = await self._episode.grade(answer or None, self._messages)
        show_grade(grade, self._console)
        if grade.reward is None or grade.reward < PASS_REWARD:
            self._console.print(
                f"not kept: only a reward of {PASS_REWARD:g} is imitated; once more"
            )
            return _AGAIN
        tools = [offer_tool(tool) for tool in self._episode.opening.tools]
        self._kept.add(demonstration_row(self._key, self._messages, tools, grade.reward))
        self._console.print(f"kept in {self._kept.path}")
        return _NEXT


_STEPS: Mapping[str, str] = {"/reset": _AGAIN, "/skip": _NEXT, "/quit": _END}
