"""Tasks that ask what a tool answers, for servers whose state cannot be brought back or that only
read: the final answer has to be what the tool said, twice the same."""

import asyncio
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from flotilla_common.rpc.deadlines import loop_time
from flotilla_reading.own_tools.arguments import Draw, UndrawableError
from flotilla_reading.own_tools.exploration import (
    APART_S,
    SLOW_S,
    Surroundings,
    opening_fields,
    required_of,
)
from flotilla_reading.own_tools.observations import names_moment, observe
from flotilla_reading.own_tools.task_making import MadeTask
from flotilla_reading.own_tools.values import is_harmless, leaves_of, split_name
from flotilla_reading.own_tools.wording import describe_call
from flotilla_reading.play.ports import EpisodePlayer, OpenEpisode
from flotilla_reading.play.solutions import SolutionCall

# Calls of one tool that are tried for each task that is wanted.
_TRIED_EACH = 3
_MOST_FAILURES = 12
# A value that so many calls share can be guessed.
_MOST_SHARE = 0.34
_RESULT = "result"


class AnsweredCall:
    """A call of a tool that only reads, and the values of its answer by name."""

    def __init__(self, call: SolutionCall, text: str) -> None:
        self.call = call
        self.text = text
        self.values = dict(_values_of(text))


async def make_answer_tasks(
    player: EpisodePlayer, found: Surroundings, wanted: int, seed: int
) -> list[MadeTask]:
    """Return up to so many tasks, of all tools that read and take arguments. They offer no others:
    what is written would change the answers of later episodes. Raises PlayError."""
    rng = random.Random(f"{seed}:answers")
    tools = [tool for tool in found.readers if required_of(tool)]
    asked: dict[str, list[AnsweredCall]] = {}
    async with player.open_episode(opening_fields(found.env)) as episode:
        for tool in tools:
            most = _TRIED_EACH * wanted // len(tools) + 1
            asked[tool.name] = await _ask(episode, found, tool.name, tool.schema, most, rng)
    await asyncio.sleep(APART_S)
    async with player.open_episode(opening_fields(found.env)) as episode:
        for answered in asked.values():
            await _ask_again(episode, answered)
    questions = [_find_questions(each, found.prefix, datetime.now(UTC)) for each in asked.values()]
    made: dict[str, MadeTask] = {}
    # One of each tool in turn, so that no tool is asked alone.
    longest = max(map(len, questions), default=0)
    for number in range(longest):
        for each in questions:
            if number < len(each) and len(made) < wanted:
                made.setdefault(each[number].prompt, each[number])
    readers = tuple(tool.name for tool in found.readers)
    offered = readers if len(readers) < len(found.tools) else ()
    return [replace(task, offered=offered) for task in made.values()]


async def _ask(
    episode: OpenEpisode,
    found: Surroundings,
    name: str,
    schema: Mapping[str, Any],
    most: int,
    rng: random.Random,
) -> list[AnsweredCall]:
    """Call a tool with drawn arguments, until so many calls have succeeded or too many failed."""
    answered: dict[str, AnsweredCall] = {}
    failures = 0
    for _ in range(2 * most + _MOST_FAILURES):
        if len(answered) >= most or failures - len(answered) >= _MOST_FAILURES:
            break
        try:
            call = SolutionCall(name, Draw(rng, found.pool, found.tables).arguments(name, schema))
        except UndrawableError:
            break
        key = json.dumps(call.arguments, sort_keys=True)
        if key in answered:
            failures += 1
            continue
        began = loop_time()
        result = await episode.call_tool(name, json.dumps(call.arguments))
        if loop_time() - began > SLOW_S:
            return []
        if observe(result.outcome, result.text).lines is None:
            failures += 1
            continue
        answered[key] = AnsweredCall(call, result.text)
    return list(answered.values())


async def _ask_again(episode: OpenEpisode, answered: list[AnsweredCall]) -> None:
    """Make the calls once more, and keep of each the values that are the same."""
    for each in answered:
        result = await episode.call_tool(each.call.name, json.dumps(each.call.arguments))
        again = dict(_values_of(result.text)) if result.outcome == "ok" else {}
        each.values = {n: v for n, v in each.values.items() if again.get(n) == v}


def _find_questions(answered: Sequence[AnsweredCall], prefix: str, now: datetime) -> list[MadeTask]:
    """Return a task for each call whose answer has a value that cannot be known without it: it
    stands in none of the arguments, and differs from call to call."""
    said: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in answered:
        for name, value in each.values.items():
            said[name][value] += 1
    tasks: list[MadeTask] = []
    for each in answered:
        given = {str(value) for _, value in leaves_of(each.call.arguments)}
        for name, value in sorted(each.values.items(), key=lambda pair: pair[0] != _RESULT):
            is_known = any(value in text or text in value for text in given)
            is_common = said[name][value] > max(1, _MOST_SHARE * len(answered))
            if is_known or is_common or len(said[name]) < 3 or names_moment(value, now):
                continue
            what = " ".join(split_name(name)) or _RESULT
            prompt = f"{describe_call(each.call, prefix)} Answer with the {what} alone."
            metadata = {"answer": value}
            tasks.append(MadeTask(prompt, (each.call,), (each.text,), metadata, value))
            break
    return tasks


def _values_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the values that an answer may be asked for, by name: the leaves of JSON that have a
    name of their own, or the numbers of a text, by their place in it."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        leaves = list(_paths_of(cast("dict[str, Any]", answer)))
        yield from ((n, v) for n, v in leaves if is_harmless(v.lstrip("+-")) and len(v) <= 40)
        return
    numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)", text[:2000])
    if numbers:
        # What was calculated comes last.
        yield _RESULT, numbers[-1]
    elif len(text) <= 40 and is_harmless(text.strip()):
        yield _RESULT, text.strip()


def _paths_of(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        name = f"{before} {key}".strip()
        if isinstance(each, dict) and before.count(" ") < 2:
            yield from _paths_of(cast("dict[str, Any]", each), name)
        elif isinstance(each, str | int | float) and not isinstance(each, bool):
            yield name, str(each)
