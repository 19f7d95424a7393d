"""What an untouched environment shows: only what a later episode shows as well is its state."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from flotilla_reading.own_tools.exploration import explore
from flotilla_reading.play.ports import CallResult, Grade, OfferedTool, Opening

NOW = f"{datetime.now(UTC):%a %b %d %Y %H:%M:%S}"
ANSWERS = {
    "show_info": f"created: {NOW} GMT+0000 (Coordinated Universal Time)",
    "list_events": f'[{{"day": "{datetime.now(UTC):%A}", "what": "lunch"}}]',
    "list_notes": "milk\neggs",
}


class Episode:
    """Answers of a server in whose every episode the same stands."""

    opening = Opening(
        prompt="",
        task="",
        observation="",
        tools=tuple(OfferedTool(name, "", {"properties": {}}, read_only=True) for name in ANSWERS),
    )

    async def call_tool(self, name: str, arguments: str) -> CallResult:
        return CallResult("ok", ANSWERS[name], done=False)

    async def grade(
        self, answer: str | None, messages: Sequence[Mapping[str, Any]], *, again: bool = False
    ) -> Grade:
        raise AssertionError


class Player:
    @asynccontextmanager
    async def open_episode(self, task: Mapping[str, Any]) -> AsyncGenerator[Episode]:
        yield Episode()


async def test_a_time_of_today_is_no_state_although_two_episodes_began_in_the_same_second() -> None:
    found = await explore(Player(), "office", None, seed=0)
    shown = {
        probe.tool: pattern for probe, pattern in zip(found.probes, found.baseline, strict=True)
    }
    assert set(shown) == {"list_events", "list_notes"}
    assert shown["list_notes"] == [["milk"], ["eggs"]]
    # Another day may stand there tomorrow.
    assert shown["list_events"] is not None and len(shown["list_events"][0]) == 2
