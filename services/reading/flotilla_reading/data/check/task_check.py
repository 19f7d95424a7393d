"""The checks of one task, on its real environment: an untouched world is graded with no answer and
with the answers of cheats, and another one after the recorded solution."""

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flotilla_common.tasks.task_checks import CheckResult, Outcome
from flotilla_common.tasks.task_format import Task
from flotilla_reading.data.check.careless import count_careless, find_writes, grade_careless
from flotilla_reading.data.check.cheats import list_cheats, list_false_answers
from flotilla_reading.data.check.leaks import find_leak
from flotilla_reading.data.check.verdicts import (
    CHECKS,
    is_pass,
    judge_determinism,
    judge_exploit,
    judge_failure,
    judge_gold,
    judge_noop,
    judge_reachable,
    unchecked,
)
from flotilla_reading.play.ports import EpisodePlayer, Grade, PlayError
from flotilla_reading.play.solutions import Solution
from flotilla_reading.play.world import Step, World, open_world

_GRADES = 3
# A verifier that names a clock or chance is graded more often, over some seconds.
_SUSPECT_GRADES, _PAUSE_S = 12, 0.41
_SUSPECT = re.compile(
    r"\brandom\b|\bsecrets\b|urandom|uuid[14]\b|getpid|\btime\.|(?:from|import) time\b"
    r"|\b(?:now|today|utcnow|localtime|gmtime|strftime)\s*\(|\bhash\s*\(|\bid\s*\("
)
_ALONE = "the solution's answer, without its calls,"
_NO_SOLUTION = unchecked("there is no recorded solution")
_NO_WIRE = (
    "unchecked: the database written without the tools, for a gateway lends no instance's own wire"
)


def solution_digest(solution: Solution | None) -> str:
    """Return the SHA-256 of a solution, or "" without one."""
    return hashlib.sha256(msgspec.json.encode(solution)).hexdigest() if solution else ""


async def check_task(
    player: EpisodePlayer, task: Task, fields: Mapping[str, Any], solution: Solution | None
) -> dict[str, CheckResult]:
    """Return the results of all checks of a task with these JSON fields, by name. A failure of the
    environment is the result of each check that it kept from being made."""
    checks: dict[str, CheckResult] = {}
    try:
        await _Checker(player, task, fields, solution, checks).check()
    except PlayError as error:
        failure = judge_failure(error)
        if error.task_fault:
            checks["reachable"] = failure
            failure = unchecked("the environment refuses the task")
        checks = dict.fromkeys(CHECKS, failure) | checks
    return {name: checks[name] for name in CHECKS}


class _Checker:
    """The checks of one task; the results go to `checks` as they are known."""

    def __init__(
        self,
        player: EpisodePlayer,
        task: Task,
        fields: Mapping[str, Any],
        solution: Solution | None,
        checks: dict[str, CheckResult],
    ) -> None:
        self._player = player
        self._task = task
        self._fields = fields
        self._solution = solution
        self._checks = checks
        self._may_pass = fields.get("passes_untouched") is True

    async def check(self) -> None:
        """Raises PlayError. One episode is open at a time: two could wait for each other."""
        states: dict[str, list[Grade]] = {}
        solution = self._solution
        steps: Sequence[Step] = ()
        if solution is None:
            self._checks.update(dict.fromkeys(("gold", "leak", "reachable"), _NO_SOLUTION))
        else:
            async with open_world(self._player, self._fields, solution.calls) as solved:
                opening = await solved.open()
                self._checks["reachable"] = judge_reachable(solution, opening.tools)
                states["the solution's end state"] = await self._check_gold(solved, solution)
                steps = solved.steps
        async with open_world(self._player, self._fields) as untouched:
            opening = await untouched.open()
            states["an untouched world"] = await self._check_noop(untouched)
            self._checks["determinism"] = judge_determinism(states)
            alone = await self._grade_alone(untouched)
            writes = find_writes(steps, opening.tools)
            is_asked = alone is not None and is_pass(alone) and not writes
            if solution is not None:
                answer = solution.answer if is_asked else None
                prompt = _write_prompt(self._task, opening.prompt)
                leak = find_leak(prompt, opening.observation, steps, answer)
                self._checks["leak"] = _judge_leak(leak)
            if self._may_pass:
                self._checks["exploit"] = unchecked("an untouched world passes, as the task says")
                return
            tried = {} if alone is None or not writes else {_ALONE: alone}
            notes = await self._try_answers(untouched, tried, is_asked=is_asked)
        if solution is not None and writes and is_pass(states["the solution's end state"][0]):
            tried |= await grade_careless(
                self._player, self._fields, steps, writes, solution.answer
            )
        self._checks["exploit"] = judge_exploit(tried, notes)

    async def _grade_alone(self, untouched: World) -> Grade | None:
        """Grade the solution's answer without its calls."""
        if self._solution is None or self._solution.answer is None or self._may_pass:
            return None
        return await untouched.grade(self._solution.answer)

    async def _check_noop(self, world: World) -> list[Grade]:
        answer: str | None = None
        first = await world.grade(answer)
        if first.verifier_fault:
            # It may need an answer: a policy that ends without one has no grade.
            answer = ""
            first = await world.grade(answer)
        self._checks["noop"] = judge_noop(first, may_pass=self._may_pass)
        return [first, *await self._repeat(world, answer)]

    async def _repeat(self, world: World, answer: str | None) -> list[Grade]:
        """Grade the same state again, often and slowly enough to find out what a verifier may
        depend on."""
        count = _grades_of(self._task)
        grades: list[Grade] = []
        for _ in range(count - 1):
            await asyncio.sleep(0.0 if count == _GRADES else _PAUSE_S)
            grades.append(await world.grade(answer))
        return grades

    async def _check_gold(self, world: World, solution: Solution) -> list[Grade]:
        first = await world.grade(solution.answer)
        answers = solution.answer is not None
        did = f"the solution ({len(solution.calls)} calls{' and an answer' if answers else ''})"
        failed = [f"{s.call.name}: {s.outcome}" for s in world.steps if s.outcome != "ok"]
        did += f", of which {', '.join(failed)}," if failed else ""
        self._checks["gold"] = judge_gold(did, first)
        return [first, *await self._repeat(world, solution.answer)]

    async def _try_answers(
        self, untouched: World, tried: dict[str, Grade], *, is_asked: bool
    ) -> list[str]:
        """Add the grades of cheating answers to those `tried`, up to one that passes, and return
        notes on what was not tried. `is_asked` if the solution's answer is all that is graded."""
        cheats, notes = list_cheats(self._task), [_NO_WIRE]
        answer = self._solution.answer if self._solution else None
        if is_asked:
            cheats = [cheat for cheat in cheats if not cheat.is_word]
            notes.append("unchecked: the verifier's words, of which one may be the answer")
            cheats.extend(list_false_answers(answer or ""))
        for cheat in cheats:
            grade = await untouched.grade(cheat.answer)
            if cheat.is_word and self._solution is None and is_pass(grade):
                notes.append(
                    f"unchecked: {cheat.name} passes; a solution would tell whether it may"
                )
                break
            tried[cheat.name] = grade
            if is_pass(grade):
                break
        return notes


def _grades_of(task: Task) -> int:
    return _SUSPECT_GRADES if _SUSPECT.search(task.verifier or "") else _GRADES


def _write_prompt(task: Task, prompt: str) -> str:
    """Return a prompt with the task's variables, which a policy reads before it, except for those
    that say who it is."""
    given = {name: value for name, value in task.variables.items() if "LOGGED_IN" not in name}
    return "\n".join([*(f"{name}: {value}" for name, value in given.items()), prompt])


def _judge_leak(leak: str) -> CheckResult:
    if leak:
        return CheckResult(Outcome.INVALID, leak)
    return CheckResult(Outcome.VALID, "nothing that the solution learned stands in the prompt")


def count_episodes(task: Task, solution: Solution | None, *, regrades: bool) -> int:
    """Return the most episodes that the checks of a task open, on an environment that `regrades`
    or does not."""
    worlds, careless = (1, 0) if solution is None else (2, count_careless(solution.calls))
    if regrades:
        return worlds + careless
    cheats = len(list_cheats(task)) + worlds
    return worlds * _grades_of(task) + cheats + careless
