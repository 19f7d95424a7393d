"""The work of a collection: tries of a teacher, then replays of those that passed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_common.aio.concurrency import raise_failure, running_tasks
from flotilla_common.tasks.task_digests import task_digest
from flotilla_common.tasks.task_files import ReadTask
from flotilla_reading.data.collect.budget import TeacherStoppedError
from flotilla_reading.data.collect.fates import Replay, Rules, Verdict, judge, needs_replay
from flotilla_reading.data.collect.ledger import Ledger, Try
from flotilla_reading.data.collect.recorded_episodes import find_solution
from flotilla_reading.play.ports import EpisodePlayer, OfferedTool, PlayError
from flotilla_reading.play.world import open_world


@dataclass(frozen=True, slots=True)
class SourceTask:
    """A task of the source: its key and environment, its JSON, and the digest of all that it
    says."""

    key: str
    env_key: str
    digest: str
    fields: Mapping[str, Any]
    text: str


def to_source_task(read: ReadTask) -> SourceTask:
    fields = read.fields
    digest = task_digest(read.task, fields)
    return SourceTask(read.task.key, read.task.env_key, digest, fields, read.text)


@dataclass(frozen=True, slots=True)
class Plan:
    """How tasks are tried and judged: `tries` of the teacher at each, 0 without one; with `retry`,
    tries and replays without a grade once more."""

    tries: int
    rules: Rules
    retry: bool = False


# Plays a try at a task to its end, and writes both to the ledger. Raises TeacherStoppedError.
PlayTry = Callable[[SourceTask, Try], Awaitable[None]]
# Formats a tool as the teacher is offered it.
OfferTool = Callable[[OfferedTool], Mapping[str, Any]]


class Collection:
    """The tasks of a source with their ledger. `stopped` says why the teacher is asked no
    more."""

    def __init__(self, tasks: Sequence[SourceTask], ledger: Ledger, plan: Plan) -> None:
        self.tasks = tasks
        self.ledger = ledger
        self.plan = plan
        self.stopped = ""
        # Tries and replays before this run, which it may make once more.
        self._old = {each.id for task in tasks for each in ledger.tries_of(task.digest)}

    def tries_of(self, task: SourceTask) -> list[Try]:
        """Return the tries that count: all recorded ones, and the last at each place."""
        tries = self.ledger.tries_of(task.digest)
        last = {each.place: each for each in tries if 0 < each.place <= self.plan.tries}
        return [each for each in tries if not each.place or last.get(each.place) is each]

    def verdict_of(self, task: SourceTask) -> Verdict:
        tries = self.tries_of(task)
        return judge(
            [each.outcome for each in tries if each.ended], self._missing(tries), self.plan.rules
        )

    def open_places(self, task: SourceTask) -> list[int]:
        """Return the places at which the teacher still tries a task: those without an ended try, or
        with one that is tried once more."""
        ended = {each.place for each in self.tries_of(task) if each.ended and not self._again(each)}
        return [place for place in range(1, self.plan.tries + 1) if place not in ended]

    def count_ungraded(self, task: SourceTask) -> int:
        """Return how many of the teacher's tries, and of the replays, have ended without a
        grade."""
        tries = [each for each in self.tries_of(task) if each.ended]
        replays = [each.replay for each in tries if each.replay]
        ungraded = [*(each for each in tries if each.place), *replays]
        return sum(each.reward is None for each in ungraded)

    def find_replays(self, task: SourceTask) -> list[Try]:
        """Return the tries of a task that passed and are to be replayed, if that decides about
        it."""
        tries = self.tries_of(task)
        ended = [each.outcome for each in tries if each.ended]
        if not needs_replay(ended, self._missing(tries), self.plan.rules):
            return []
        return [each for each in tries if each.outcome.passed and self._is_unreplayed(each)]

    async def run(
        self,
        player: EpisodePlayer,
        play_try: PlayTry,
        offer_tool: OfferTool,
        concurrency: int,
        show: Callable[[SourceTask], object],
    ) -> None:
        """Make the tries that are missing, and replay; `show` gets the task of each. If the teacher
        is stopped, replays go on."""
        waiting = self._find_work()
        left = {task.digest: len(self.open_places(task)) for task in self.tasks}

        async def work() -> None:
            for task, place in waiting:
                if place:
                    if not await self._play(task, place, play_try):
                        continue
                    left[task.digest] -= 1
                    show(task)
                if not left[task.digest]:
                    await self._replay(task, player, offer_tool)
                    show(task)

        async with running_tasks(*(work() for _ in range(concurrency))) as running:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            raise_failure(running)

    def _missing(self, tries: Sequence[Try]) -> int:
        return self.plan.tries - sum(each.ended for each in tries if each.place)

    def _again(self, one: Try) -> bool:
        return self.plan.retry and one.reward is None and one.id in self._old

    def _is_unreplayed(self, one: Try) -> bool:
        return one.replay is None or (self.plan.retry and one.replay.reward is None)

    def _find_work(self) -> Iterator[tuple[SourceTask, int]]:
        """Yield each open place of a task, or 0 for a task that has none."""
        for task in self.tasks:
            yield from ((task, place) for place in self.open_places(task) or [0])

    async def _play(self, task: SourceTask, place: int, play_try: PlayTry) -> bool:
        """Play a try at a place, or go on with the one that was cut off; return whether it has
        ended."""
        found = [each for each in self.tries_of(task) if each.place == place and not each.ended]
        if self.stopped and not found:
            return False
        one = found[0] if found else self.ledger.begin_try(task.digest, task.key, place)
        try:
            await play_try(task, one)
        except TeacherStoppedError as error:
            self.stopped = str(error)
            return False
        return True

    async def _replay(self, task: SourceTask, player: EpisodePlayer, offer: OfferTool) -> None:
        for one in self.find_replays(task):
            await self._replay_try(task, one, player, offer)

    async def _replay_try(
        self, task: SourceTask, one: Try, player: EpisodePlayer, offer: OfferTool
    ) -> None:
        conversation = self.ledger.conversation_of(one)
        solution = find_solution(task.key, conversation.messages, stopped=bool(one.stopped))
        number, tools = self.ledger.begin_replay(one), None
        try:
            async with open_world(player, task.fields, solution.calls) as world:
                tools = [offer(tool) for tool in (await world.open()).tools]
                grade = await world.grade(solution.answer)
            reason = "" if grade.reward is not None else f"{grade.no_grade}: {grade.detail}"
            replay = Replay(grade.reward, reason)
        except PlayError as error:
            replay = Replay(None, str(error))
        self.ledger.end_replay(number, one, replay, tools)
