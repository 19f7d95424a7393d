"""A conversation in an episode, line by line, with an episode and a model in this process."""

import asyncio
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from flotilla_launcher.cli.adapters.chat_conversation import ChatConversation
from flotilla_launcher.cli.adapters.chat_endpoint import ModelTurn, WrittenCall
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.cli.turn_interrupts import TurnInterrupts
from flotilla_reading.play.ports import CallResult, Grade, Opening


class OnceGraded:
    """An episode whose first grade is final, and which a call of `end` ends."""

    def __init__(self) -> None:
        self.opening = Opening("Do it.", "Today is Monday.\n\nDo it.", "", ())
        self.calls: list[str] = []
        self.grades: list[str | None] = []

    async def call_tool(self, name: str, arguments: str) -> CallResult:
        self.calls.append(name)
        return CallResult("ok", f"{name} done", done=name == "end")

    async def grade(
        self, answer: str | None, messages: Sequence[Mapping[str, Any]], *, again: bool = False
    ) -> Grade:
        assert not again
        self.grades.append(answer)
        return Grade(1.0)


class Scripted:
    """A model that makes these calls in one turn, and then answers."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.seen: list[list[Mapping[str, Any]]] = []

    async def answer_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> ModelTurn:
        self.seen.append(list(messages))
        calls = tuple(WrittenCall(f"id-{n}", name, "{}") for n, name in enumerate(self._names))
        written = [{"id": each.call_id, "function": {"name": each.name}} for each in calls]
        self._names = ()
        if not calls:
            return ModelTurn({"role": "assistant", "content": "so <done>"}, "so <done>", (), False)
        return ModelTurn({"role": "assistant", "tool_calls": written}, "", calls, False)


async def hold(
    episode: OnceGraded,
    model: Scripted,
    *lines: str,
    first: str = "",
    interrupts: TurnInterrupts | None = None,
) -> tuple[bool, str]:
    """Return whether the conversation is to begin anew, and what was shown."""
    shown = StringIO()
    given = asyncio.StreamReader()
    given.feed_data("".join(f"{line}\n" for line in lines).encode())
    given.feed_eof()
    talk = ChatConversation(
        *(episode, model, 5, interrupts or TurnInterrupts(lambda: None)),
        Terminal(file=shown, soft_wrap=True),
        graded=True,
    )
    again = await talk.hold(given, first)
    if not again:
        await talk.end()
    return again, shown.getvalue()


async def test_a_final_grade_is_given_once_and_kept_at_the_end() -> None:
    episode = OnceGraded()
    _, shown = await hold(episode, Scripted(), "/grade", "/grade", first=episode.opening.task)
    assert episode.grades == ["so"]
    assert shown.count("reward   1") == 1
    assert "which is final; /reset opens the task again" in shown


async def test_after_the_end_of_an_episode_no_further_call_is_made() -> None:
    episode, model = OnceGraded(), Scripted("look", "end", "look")
    again, shown = await hold(episode, model, "go", "and now?", "/reset", "never read")
    assert (again, episode.calls, len(model.seen)) == (True, ["look", "end"], 1)
    assert "the environment has ended the episode" in shown
    assert "the episode is over: /grade grades it" in shown


async def test_calls_after_ctrl_c_are_answered_as_not_made() -> None:
    class Pressed(OnceGraded):
        async def call_tool(self, name: str, arguments: str) -> CallResult:
            interrupts.note_press()
            return await super().call_tool(name, arguments)

    interrupts = TurnInterrupts(lambda: None)
    episode, model = Pressed(), Scripted("one", "two")
    _, shown = await hold(episode, model, "go", "go on", interrupts=interrupts)
    assert episode.calls == ["one"]
    assert "the turn was ended" in shown
    answers = {m["tool_call_id"]: m["content"] for m in model.seen[1] if m["role"] == "tool"}
    assert answers["id-0"] == "one done"
    assert "the user ended the turn before this call" in answers["id-1"]
    assert model.seen[1][-1] == {"role": "user", "content": "go on"}
