"""Tasks that are made with their end state: sampled calls are played on a fresh instance, twice,
and kept if they succeed, change what can be seen, and do it both times alike."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from flotilla_common.rpc.deadlines import loop_time
from flotilla_reading.own_tools.arguments import Draw, UndrawableError
from flotilla_reading.own_tools.exploration import (
    APART_S,
    SLOW_S,
    Surroundings,
    aim_probes,
    opening_fields,
    read_state,
    things_of,
)
from flotilla_reading.own_tools.observations import (
    Observation,
    Pattern,
    Probe,
    expect,
    is_met,
)
from flotilla_reading.own_tools.values import leaves_of
from flotilla_reading.own_tools.wording import write_prompt
from flotilla_reading.play.ports import CallResult, EpisodePlayer, OpenEpisode, PlayError
from flotilla_reading.play.solutions import SolutionCall

_LENGTHS, _LENGTH_WEIGHTS = (1, 2, 3), (60, 30, 10)
# Of the things that a task is about, beside those of the untouched environment.
_MOST_AIMED, _MOST_KEPT = 16, 4
_BATCH = 16
# A tool that fails so often, and never succeeds, is not tried again.
_GIVEN_UP = 8
_MOST_BATCHES = 40


class NotResetError(Exception):
    """A new episode does not begin as the first one did; the message names a probe."""


@dataclass(frozen=True, slots=True)
class MadeTask:
    """A task: the calls that solve it, with what they were answered, and what it expects. `offered`
    are the only tools that the policy gets; empty: all."""

    prompt: str
    calls: tuple[SolutionCall, ...]
    results: tuple[str, ...]
    metadata: Mapping[str, Any]
    answer: str | None = None
    offered: tuple[str, ...] = ()


@dataclass(slots=True)
class MakingLog:
    """What became of the sampled calls, by reason, and of each tool's: tried and kept."""

    dropped: Counter[str] = field(default_factory=Counter[str])
    tried: Counter[str] = field(default_factory=Counter[str])
    kept: Counter[str] = field(default_factory=Counter[str])
    slow: set[str] = field(default_factory=set[str])

    def usable(self, names: Sequence[str]) -> list[str]:
        able = (n for n in names if self.kept[n] or self.tried[n] < _GIVEN_UP)
        return [name for name in able if name not in self.slow]


@dataclass(slots=True)
class _Candidate:
    calls: list[SolutionCall]
    made: dict[str, list[Any]]
    probes: list[Probe] = field(default_factory=list[Probe])
    first: list[Observation] = field(default_factory=list[Observation])
    played_at: float = 0.0


class TaskMaker:
    """Makes tasks of one environment, in batches that are played concurrently. The same seed makes
    the same tasks on a server that answers the same."""

    def __init__(
        self, player: EpisodePlayer, found: Surroundings, seed: int, concurrency: int
    ) -> None:
        self._player = player
        self._found = found
        self._seed = seed
        self._places = asyncio.Semaphore(concurrency)
        self._number = 0
        self._prompts: set[str] = set()
        self._states: set[str] = set()
        self.log = MakingLog()

    async def make_batch(self) -> list[MadeTask]:
        """Sample a batch of calls; return the tasks that were made of it. Raises NotResetError, and
        PlayError if no episode of it can be played."""
        usable = self.log.usable([tool.name for tool in self._found.writers])
        if not usable:
            return []
        candidates: list[_Candidate] = []
        for _ in range(_BATCH):
            if candidate := self._sample(usable):
                candidates.append(candidate)
        return await self._make_of(candidates)

    async def make_proposed(self, proposed: Sequence[Sequence[SolutionCall]]) -> list[MadeTask]:
        """Return the tasks that were made of calls which somebody else has chosen. Raises as
        `make_batch` does."""
        return await self._make_of([_Candidate(list(calls), {}) for calls in proposed])

    async def _make_of(self, candidates: Sequence[_Candidate]) -> list[MadeTask]:
        made = await self._play_all(candidates, self._play_first)
        made = await self._play_all([each for each in made if each], self._play_again)
        return [task for task in made if task and self._is_new(task)]

    def _sample(self, usable: Sequence[str]) -> _Candidate | None:
        rng = random.Random(f"{self._seed}:{self._number}")
        self._number += 1
        draw = Draw(rng, self._found.pool, self._found.tables)
        schemas = {tool.name: tool.schema for tool in self._found.writers}
        length = rng.choices(_LENGTHS, _LENGTH_WEIGHTS)[0]
        calls: list[SolutionCall] = []
        for _ in range(length):
            name = rng.choice(usable)
            try:
                calls.append(SolutionCall(name, draw.arguments(name, schemas[name])))
            except UndrawableError as error:
                self.log.tried[name] += 1
                self.log.dropped[f"{name}: {error}"] += 1
                return None
        return _Candidate(calls, draw.made)

    async def _play_all(
        self, items: Sequence[Any], play: Callable[[Any], Awaitable[Any]]
    ) -> list[Any]:
        async def play_one(item: Any) -> Any:
            async with self._places:
                try:
                    return await play(item)
                except (PlayError, NotResetError) as error:
                    return error

        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(play_one(item)) for item in items]
        results = [each.result() for each in playing]
        if other := next((each for each in results if isinstance(each, NotResetError)), None):
            raise other
        errors = [each for each in results if isinstance(each, PlayError)]
        if items and len(errors) == len(items):
            raise errors[0]
        for _ in errors:
            self.log.dropped["the environment was lost"] += 1
        return [None if isinstance(each, PlayError) else each for each in results]

    async def _play_first(self, candidate: _Candidate) -> _Candidate | None:
        """Play calls and look at what they left; None if one failed."""
        async with self._player.open_episode(opening_fields(self._found.env)) as episode:
            self._check_baseline(await read_state(episode, self._found.probes))
            for call in candidate.calls:
                began = loop_time()
                result = await _make_call(episode, call)
                if loop_time() - began > SLOW_S:
                    self.log.slow.add(call.name)
                    return self._drop(candidate, f"{call.name} takes longer than {SLOW_S:g} s")
                if not _succeeded(result):
                    return self._drop(candidate, "a call failed")
            values = {kind: list(each) for kind, each in candidate.made.items()}
            for call in candidate.calls:
                for kind, things in things_of(call.arguments).items():
                    values[kind] = list(dict.fromkeys([*values.get(kind, []), *things]))
            rng = random.Random(f"{self._seed}:aim")
            aimed = aim_probes(self._found, values, rng, _MOST_AIMED)
            known = {probe.identity for probe in self._found.probes}
            aimed = [probe for probe in aimed if probe.identity not in known]
            seen = await read_state(episode, [*self._found.probes, *aimed])
        count = len(self._found.probes)
        kept = _choose_probes(candidate.calls, list(zip(aimed, seen[count:], strict=True)))
        candidate.probes = [*self._found.probes, *(probe for probe, _ in kept)]
        candidate.first = [*seen[:count], *(observed for _, observed in kept)]
        candidate.played_at = loop_time()
        return candidate

    def _check_baseline(self, seen: Sequence[Observation]) -> None:
        """Raises NotResetError if the probes answer otherwise than of an untouched instance."""
        for probe, before, now in zip(self._found.probes, self._found.baseline, seen, strict=False):
            if not is_met(before, now):
                raise NotResetError(f"{probe.identity} answers otherwise than in the first episode")

    async def _play_again(self, candidate: _Candidate) -> MadeTask | None:
        """Play the same calls once more, look after each of them, and return the task if all is as
        it was and each call changed something."""
        await asyncio.sleep(max(0.0, candidate.played_at + APART_S - loop_time()))
        results: list[str] = []
        async with self._player.open_episode(opening_fields(self._found.env)) as episode:
            states = [await read_state(episode, candidate.probes)]
            self._check_baseline(states[0])
            for call in candidate.calls:
                result = await _make_call(episode, call)
                if not _succeeded(result):
                    return self._drop(candidate, "the same calls fail the second time")
                results.append(result.text)
                states.append(await read_state(episode, candidate.probes))
        expected = _find_expected(candidate, states, len(self._found.probes), datetime.now(UTC))
        if isinstance(expected, str):
            return self._drop(candidate, expected)
        for name in {call.name for call in candidate.calls}:
            self.log.tried[name] += 1
            self.log.kept[name] += 1
        return MadeTask(
            write_prompt(candidate.calls, self._found.prefix),
            tuple(candidate.calls),
            tuple(results),
            {"state": expected},
        )

    def _drop(self, candidate: _Candidate, why: str) -> None:
        for name in {call.name for call in candidate.calls}:
            self.log.tried[name] += len(candidate.calls) == 1
        self.log.dropped[why] += 1

    def _is_new(self, task: MadeTask) -> bool:
        """Return True if no task before it asks for the same or ends the same."""
        state = json.dumps(task.metadata, sort_keys=True)
        prompt = re.sub(r"\W+", " ", task.prompt).casefold()
        if prompt in self._prompts or state in self._states:
            self.log.dropped["the same as another task"] += 1
            return False
        self._prompts.add(prompt)
        self._states.add(state)
        return True


def _succeeded(result: CallResult) -> bool:
    return result.outcome == "ok" and not result.done


async def _make_call(episode: OpenEpisode, call: SolutionCall) -> CallResult:
    return await episode.call_tool(call.name, json.dumps(call.arguments))


def _choose_probes(
    calls: Sequence[SolutionCall], aimed: Sequence[tuple[Probe, Observation]]
) -> list[tuple[Probe, Observation]]:
    """Return the probes that show most of what the calls were given, short ones first; then those
    of what is gone."""
    given = {str(value) for call in calls for _, value in leaves_of(call.arguments)}

    def rank(each: tuple[Probe, Observation]) -> tuple[int, int]:
        probe, observed = each
        asked = {str(value) for _, value in leaves_of(dict(probe.arguments))}
        text = "\n".join(observed.lines or ())
        return -sum(value in text for value in given - asked), len(text)

    usable = [each for each in aimed if each[1].usable]
    shown = sorted((each for each in usable if each[1].lines is not None), key=rank)
    chosen: list[tuple[Probe, Observation]] = []
    for each in shown:
        if all(each[1].lines != other.lines for _, other in chosen):
            chosen.append(each)
    gone = [each for each in usable if each[1].lines is None]
    return [*chosen[:_MOST_KEPT], *gone[:_MOST_KEPT]]


def _find_expected(
    candidate: _Candidate,
    states: Sequence[Sequence[Observation]],
    general: int,
    now: datetime,
) -> list[dict[str, Any]] | str:
    """Return what a task expects of the state, by probe, of which so many are `general`; or why it
    is no task."""
    untouched, *_, final = states
    expected: list[dict[str, Any]] = []
    changed, exact = False, []
    for number, probe in enumerate(candidate.probes):
        agree, pattern = expect(candidate.first[number], final[number], now)
        if not agree:
            continue
        differs = not is_met(pattern, untouched[number])
        if number >= general and not differs:
            # It shows nothing of what the calls did.
            continue
        changed = changed or differs
        if pattern is None or all(len(texts) == 1 for texts in pattern):
            exact.append(number)
        expected.append(_to_check(probe, pattern))
    if not changed:
        return "nothing that can be seen has changed"
    for before, after in pairwise(states):
        if all(before[number] == after[number] for number in exact):
            return "one of the calls changed nothing that can be seen"
    return expected


def _to_check(probe: Probe, pattern: Pattern | None) -> dict[str, Any]:
    return {"tool": probe.tool, "arguments": dict(probe.arguments), "lines": pattern}


async def make_tasks(
    maker: TaskMaker,
    wanted: int,
    check: Callable[[Sequence[MadeTask]], Awaitable[Sequence[MadeTask]]],
    show: Callable[[int], object],
) -> list[MadeTask]:
    """Make so many tasks that `check` finds valid; fewer if the tools yield no more. Raises
    NotResetError and PlayError."""
    valid: list[MadeTask] = []
    idle = 0
    for _ in range(_MOST_BATCHES):
        if len(valid) >= wanted or idle == 3:
            break
        found = await check((await maker.make_batch())[: wanted - len(valid)])
        valid += found
        idle = 0 if found else idle + 1
        show(len(valid))
    return valid
