"""A user's conversation with a model that has the tools of an open episode."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_common.text.printable_text import make_visible, one_line
from flotilla_launcher.cli.adapters.chat_endpoint import EndpointError, ModelTurn
from flotilla_launcher.cli.adapters.model_attempts import (
    DONE,
    Model,
    ModelAttempt,
    make_call,
    offer_tool,
)
from flotilla_launcher.cli.interrupts import InterruptedByUserError
from flotilla_launcher.cli.standard_input import read_line
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.cli.turn_interrupts import TurnInterrupts
from flotilla_reading.play.ports import Grade, OfferedTool, OpenEpisode

HELP = "/tools lists the tools, /reset begins anew, /grade grades, /quit ends; Ctrl-C ends a turn"
_SHOWN_CHARACTERS = 4_000
_DESCRIPTION_CHARACTERS = 200
_STOPPED = '{"error": "the user ended the turn before this call"}'
_THOUGHTS = ("reasoning_content", "reasoning")


class ChatConversation:
    """The conversation in one episode. `graded` says whether the task has a grade to give, and
    `grade` is the last one."""

    def __init__(
        self,
        episode: OpenEpisode,
        model: Model,
        most_turns: int,
        interrupts: TurnInterrupts,
        console: Terminal,
        *,
        graded: bool,
    ) -> None:
        self._episode = episode
        self._model = model
        self._most_turns = most_turns
        self._interrupts = interrupts
        self._console = console
        self._graded = graded
        self._attempt = ModelAttempt()
        self._tools = [offer_tool(tool) for tool in episode.opening.tools]
        self._over = False
        # How many messages the last grade is of.
        self._graded_messages = 0
        self.grade: Grade | None = None

    async def hold(self, lines: asyncio.StreamReader, first: str = "") -> bool:
        """Answer `first`, then the lines of the user; return whether to begin anew. Raises
        CommandError, and PlayError if the environment is lost."""
        if first:
            self._interrupts.begin_line()
            self._console.print(f"you      {first}")
            await self._answer(first)
        while line := await self._read(lines):
            if line == "/reset":
                return True
            if line == "/quit":
                break
            if not line.startswith("/"):
                await self._answer(line)
            elif line == "/tools":
                show_tools(self._episode.opening.tools, self._console)
            elif line == "/grade":
                await self.grade_it()
            else:
                self._console.print(f"there is no {line}: {HELP}")
        return False

    async def grade_it(self) -> None:
        """Grade the episode as it is, with the model's last text as the answer, and show it. The
        first grade is final, unless the environment can be graded again."""
        if not self._graded:
            self._console.print("there is no task to grade: --task KEY begins with one")
            return
        if self.grade is not None and not self._episode.opening.regrades:
            self._console.print("it has its grade, which is final; /reset opens the task again")
            return
        again, self._graded_messages = self.grade is not None, len(self._attempt.messages)
        answer = _find_answer(self._attempt.messages)
        self.grade = await self._episode.grade(answer, self._attempt.messages, again=again)
        show_grade(self.grade, self._console)

    async def end(self) -> None:
        """Grade the episode, unless it has its grade. Raises PlayError."""
        has_more = len(self._attempt.messages) > self._graded_messages
        if self.grade is None or (has_more and self._episode.opening.regrades):
            await self.grade_it()

    async def _read(self, lines: asyncio.StreamReader) -> str:
        if self._console.is_terminal:
            self._console.print("> ", end="")
        line = await read_line(lines)
        self._interrupts.begin_line()
        return line

    async def _answer(self, text: str) -> None:
        """Have the model answer a line of the user. A line that it did not begin to answer is as
        if never said."""
        if self._over:
            self._console.print("the episode is over: /grade grades it, /reset opens another")
            return
        messages = self._attempt.messages
        opening, begun = self._episode.opening, len(messages)
        if not messages and text != opening.task:
            # As the policy reads a task: with the environment's date and variables.
            text = opening.task.replace(opening.prompt, text, 1)
        messages.append({"role": "user", "content": text})
        try:
            await self._take_turns()
        except InterruptedByUserError:
            self._console.print("the turn was ended")
        except EndpointError as error:
            self._console.print(f"the model gave no answer: {error}")
        if len(messages) == begun + 1:
            del messages[begun:]

    async def _take_turns(self) -> None:
        """Raises InterruptedByUserError between calls, which are always finished; EndpointError;
        and PlayError."""
        for _ in range(self._most_turns):
            asked = self._model.answer_messages(self._attempt.messages, self._tools)
            turn = await self._interrupts.unless_turn_ended(asked)
            self._attempt.messages.append(turn.message)
            self._show_turn(turn)
            if not turn.calls:
                return
            await self._make_calls(turn)
            if self._over:
                self._console.print("the environment has ended the episode")
                return
        self._console.print(f"{self._most_turns} turns were not enough; say how to go on")

    async def _make_calls(self, turn: ModelTurn) -> None:
        messages = self._attempt.messages
        for call in turn.calls:
            if self._over or self._interrupts.turn_ended:
                # A call without an answer would be an error to many chat templates.
                answer = {"tool_call_id": call.call_id, "content": _STOPPED}
                messages.append({"role": "tool", **answer})
                continue
            self._console.print(f"call     {call.name} {_shorten(call.arguments)}")
            self._over = await make_call(self._episode, call, self._attempt)
            self._console.print(f"answer   {_shorten(messages[-1]['content'])}")
        if self._interrupts.turn_ended:
            raise InterruptedByUserError

    def _show_turn(self, turn: ModelTurn) -> None:
        for name in _THOUGHTS:
            if thought := turn.message.get(name):
                self._console.print(f"thinks   {_shorten(str(thought))}", style="dim")
                break
        if text := turn.text.replace(DONE, "").strip():
            self._console.print(f"model    {_shorten(text)}")
        if turn.cut:
            self._console.print("the turn was cut at the endpoint's limit of tokens")


def show_tools(tools: Sequence[OfferedTool], console: Terminal) -> None:
    """Print each tool on a line, with the names of its arguments."""
    for tool in tools:
        properties = tool.schema.get("properties")
        names = ", ".join(properties) if isinstance(properties, dict) else ""
        described = one_line(tool.description, _DESCRIPTION_CHARACTERS)
        console.print(f"tool     {make_visible(f'{tool.name}({names})', lines=False)}  {described}")


def show_grade(grade: Grade, console: Terminal) -> None:
    """Print the checks that failed, and the reward or the reason why there is none."""
    for check in grade.failed:
        console.print(f"failed   {check}")
    if grade.reward is None:
        console.print(f"no grade {grade.no_grade}: {grade.detail}")
    else:
        console.print(f"reward   {grade.reward:g}")


def _shorten(text: str) -> str:
    left = len(text) - _SHOWN_CHARACTERS
    return text if left <= 0 else f"{text[:_SHOWN_CHARACTERS]}... ({left} more characters)"


def _find_answer(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of the last turn, if it made no call."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return str(last.get("content") or "").replace(DONE, "").strip()
