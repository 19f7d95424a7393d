"""Policies that do what a task asks for, but with other values or to another object: a verifier
that only looks whether something was done passes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.reading.data.check.cheats import alter_target, alter_values
from services.reading.data.check.verdicts import is_pass
from services.reading.data.check.world import Move, Step, open_world
from services.reading.play.ports import EpisodePlayer, Grade, OfferedTool
from services.reading.play.solutions import SolutionCall

_SUBMIT = "submit_final_answer"


def find_writes(steps: Sequence[Step], tools: Sequence[OfferedTool]) -> list[int]:
    """Return the numbers of the steps that changed the world, as far as the tools say what they
    do."""
    if not any(tool.read_only for tool in tools):
        return []
    writing = {tool.name for tool in tools if not tool.read_only} - {_SUBMIT}
    found = enumerate(steps)
    return [n for n, step in found if step.call.name in writing and step.outcome == "ok"]


async def grade_careless(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    steps: Sequence[Step],
    write: int,
    answer: str | None,
) -> dict[str, Grade]:
    """Return the grades of careless versions of a solution, by what they did. They differ from it
    in the step `write`. Raises PlayError.

    A version that passes is left out if the solution passes without that step, too: then the task
    may not demand it."""
    calls = [step.call for step in steps]
    altered = alter_values(calls[write], str(fields["prompt"]))
    versions = {
        "other values": (altered,) if altered else (),
        "another object": alter_target(steps, write),
    }
    grades: dict[str, Grade] = {}
    for what, others in versions.items():
        if not others:
            continue
        moves: list[Move] = [*calls[:write], others, *calls[write + 1 :]]
        async with open_world(player, fields, moves) as world:
            await world.open()
            made = next((s.call for s in world.steps if _is_made(s, others)), None)
            if made is None:
                # The environment has no such thing.
                continue
            grade = await world.grade(answer)
        if is_pass(grade) and await _passes_without(player, fields, calls, write, answer):
            continue
        arguments = msgspec.json.encode(made.arguments).decode()
        grades[f"the solution with {what}, {made.name} {arguments},"] = grade
    return grades


def _is_made(step: Step, others: Sequence[SolutionCall]) -> bool:
    return step.outcome == "ok" and step.call in others


async def _passes_without(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    calls: Sequence[SolutionCall],
    left_out: int,
    answer: str | None,
) -> bool:
    rest = [*calls[:left_out], *calls[left_out + 1 :]]
    async with open_world(player, fields, rest) as world:
        return is_pass(await world.grade(answer))
