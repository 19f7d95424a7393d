"""Policies that do what a task asks for, but with other values, to another object, or only a part
of it: a verifier that only looks whether something was done passes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.reading.data.check.cheats import alter_target, alter_values, find_demanded
from services.reading.data.check.verdicts import is_pass
from services.reading.play.ports import EpisodePlayer, Grade, OfferedTool
from services.reading.play.solutions import SolutionCall
from services.reading.play.world import Move, Step, open_world

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


async def grade_incomplete(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    steps: Sequence[Step],
    writes: Sequence[int],
    answer: str | None,
) -> dict[str, Grade]:
    """Return the grades of a solution without one of several writing steps that the prompt demands
    by name. Raises PlayError.

    One that passes is left out if the solution's reads do not show that its step does anything:
    the world may have been so before."""
    grades: dict[str, Grade] = {}
    if len(writes) < 2:
        return grades
    calls = [step.call for step in steps]
    reads = [n for n, step in enumerate(steps) if n not in writes and step.outcome == "ok"]
    for number in find_demanded(calls, str(fields["prompt"])):
        if number not in writes:
            continue
        rest = [*calls[:number], *calls[number + 1 :]]
        async with open_world(player, fields, rest) as world:
            grade = await world.grade(answer)
        if is_pass(grade) and not await _is_seen(
            player, fields, rest, calls[number], [calls[n] for n in reads]
        ):
            continue
        grades[f"the solution without {calls[number].name}, which the prompt demands,"] = grade
    return grades


async def _is_seen(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    rest: Sequence[SolutionCall],
    call: SolutionCall,
    reads: Sequence[SolutionCall],
) -> bool:
    """Return True if reads that agree before a call are answered otherwise after it."""
    async with open_world(player, fields, [*rest, *reads, *reads, call, *reads]) as world:
        await world.open()
        told = [(step.outcome, step.text) for step in world.steps[len(rest) :]]
    count = len(reads)
    if len(told) != 3 * count + 1:
        return False
    before, again, after = told[:count], told[count : 2 * count], told[2 * count + 1 :]
    return before == again != after


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
