"""Policies that do what a task asks for, but with other values, to another object, or without a
step of it: a verifier that only looks whether something was done passes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flotilla_reading.data.check.cheats import MOST_OBJECTS, alter_call, find_demanded
from flotilla_reading.data.check.leaks import shown_ids
from flotilla_reading.data.check.verdicts import is_pass
from flotilla_reading.play.ports import EpisodePlayer, Grade, OfferedTool
from flotilla_reading.play.solutions import SolutionCall
from flotilla_reading.play.world import Move, Step, open_world

# So many of a solution's writing steps are changed or left out, the last ones.
_MOST_WRITES = 4
_SUBMIT = "submit_final_answer"


def find_writes(steps: Sequence[Step], tools: Sequence[OfferedTool]) -> list[int]:
    """Return the numbers of the steps that changed the world, as far as the tools say what they
    do."""
    if not any(tool.read_only for tool in tools):
        return []
    writing = {tool.name for tool in tools if not tool.read_only} - {_SUBMIT}
    found = enumerate(steps)
    return [n for n, step in found if step.call.name in writing and step.outcome == "ok"]


def count_careless(calls: Sequence[SolutionCall]) -> int:
    """Return the most episodes that `grade_careless` opens: for each step with other values, on
    other objects, without the step, and one that shows what the step does."""
    return min(len(calls), _MOST_WRITES) * (1 + MOST_OBJECTS + 2)


async def grade_careless(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    steps: Sequence[Step],
    writes: Sequence[int],
    answer: str | None,
) -> dict[str, Grade]:
    """Return the grades of careless versions of a solution, by what they did. Each differs from it
    in one of its writing steps. Raises PlayError.

    If the solution passes without a step, the task may not demand it, and versions with another
    such step prove nothing. If the prompt demands it, and it does something, that is a version,
    too."""
    grades: dict[str, Grade] = {}
    calls = [step.call for step in steps]
    demanded = find_demanded(steps, writes, str(fields["prompt"]))
    for write in writes[-_MOST_WRITES:]:
        made = await _grade_altered(player, fields, steps, write, answer)
        if write not in demanded and not any(map(is_pass, made.values())):
            grades |= made
            continue
        async with open_world(player, fields, _without(calls, write)) as world:
            grade = await world.grade(answer)
        if is_pass(grade):
            made = {did: each for did, each in made.items() if not is_pass(each)}
        if write in demanded and (
            not is_pass(grade) or await _has_effect(player, fields, steps, writes, write)
        ):
            made[f"the solution without {_show(calls[write])}, which the prompt demands,"] = grade
        grades |= made
    return grades


async def _grade_altered(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    steps: Sequence[Step],
    write: int,
    answer: str | None,
) -> dict[str, Grade]:
    calls = [step.call for step in steps]
    grades: dict[str, Grade] = {}
    for what, others in alter_call(steps, write, str(fields["prompt"])):
        moves: list[Move] = [*calls[:write], others, *calls[write + 1 :]]
        async with open_world(player, fields, moves) as world:
            await world.open()
            made = next(
                (s.call for s in world.steps if s.outcome == "ok" and s.call in others), None
            )
            if made is None:
                # The environment has no such thing.
                continue
            grades[f"the solution with {what}, {_show(made)},"] = await world.grade(answer)
    return grades


async def _has_effect(
    player: EpisodePlayer,
    fields: Mapping[str, Any],
    steps: Sequence[Step],
    writes: Sequence[int],
    write: int,
) -> bool:
    """Return True if a step visibly does something, so that the world was not so before: its tool
    does each time, or reads that agree before it are answered otherwise after it, or it is itself
    when it is repeated."""
    calls = [step.call for step in steps]
    others = [n for n, step in enumerate(steps) if n not in writes and step.outcome == "ok"]
    reads, call, rest = [calls[n] for n in others], calls[write], _without(calls, write)
    async with open_world(player, fields, [*rest, *reads, *reads, call, *reads, call]) as world:
        opening = await world.open()
        told = world.steps[len(rest) :]
    count = len(reads)
    if len(told) != 3 * count + 2 or told[2 * count].outcome != "ok":
        return False
    before, again, after = (
        [(step.outcome, step.text) for step in told[start : start + count]]
        for start in (0, count, 2 * count + 1)
    )
    first, second = told[2 * count], told[-1]
    is_new = second.outcome != "ok" or shown_ids(first.text) != shown_ids(second.text)
    return is_new or before == again != after or _acts_each_time(call.name, opening.tools)


def _acts_each_time(name: str, tools: Sequence[OfferedTool]) -> bool:
    """Return True if a tool is not idempotent, in an environment that says so of tools."""
    idempotent = {tool.name for tool in tools if tool.idempotent}
    return bool(idempotent) and name not in idempotent


def _show(call: SolutionCall) -> str:
    return f"{call.name} {msgspec.json.encode(call.arguments).decode()}"


def _without(calls: Sequence[SolutionCall], number: int) -> list[SolutionCall]:
    return [*calls[:number], *calls[number + 1 :]]
