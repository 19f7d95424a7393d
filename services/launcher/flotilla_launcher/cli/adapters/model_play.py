"""A model's play of several tasks: all attempts, concurrently, and their scores."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_common.aio.concurrency import raise_failure, running_tasks
from flotilla_common.domain.even_spread import spread_evenly
from flotilla_common.text.printable_text import one_line
from flotilla_launcher.cli.adapters.chosen_model import ChosenModel, open_model
from flotilla_launcher.cli.adapters.model_attempts import Model, ModelAttempt, play_attempt
from flotilla_launcher.cli.command_runner import FAILED, OK
from flotilla_launcher.cli.task_scores import TaskScore, format_scores
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.doctor.dataset import env_key_of, key_of
from flotilla_reading.play.ports import EpisodePlayer

_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class ModelPlay:
    """What a model plays, how often, and where the attempts are written."""

    model: ChosenModel
    attempts: int
    concurrency: int
    limit: int | None
    most_turns: int
    out: Path | None


@dataclass(frozen=True, slots=True)
class PlayPlace:
    """An attempt to be made: the task, the attempt's number from 1, and the task's index among
    those played."""

    task: Mapping[str, Any]
    number: int
    index: int = 0

    @property
    def name(self) -> str:
        return key_of(self.task) or f"task {self.index}"


@dataclass(frozen=True, slots=True)
class Players:
    """Who plays: the model, where, in how many turns and in how many attempts concurrently."""

    model: Model
    episodes: EpisodePlayer
    most_turns: int
    concurrency: int

    async def play(
        self, places: Sequence[PlayPlace], take: Callable[[PlayPlace, ModelAttempt], None]
    ) -> None:
        """Make the attempts; `take` receives each as it ends, and what it raises ends them."""
        waiting = iter(places)

        async def play_waiting() -> None:
            for place in waiting:
                ended = await play_attempt(self.episodes, place.task, self.model, self.most_turns)
                take(place, ended)

        workers = min(self.concurrency, len(places))
        async with running_tasks(*(play_waiting() for _ in range(workers))) as running:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            raise_failure(running)


async def play_tasks(
    player: EpisodePlayer,
    tasks: Sequence[Mapping[str, Any]],
    play: ModelPlay,
    console: Terminal,
) -> int:
    """Play all attempts; print each as it ends, and then the scores, also after Ctrl-C. Return the
    exit code. Raises CommandError."""
    tasks = spread_evenly(tasks, play.limit, group_of=env_key_of, key_of=key_of)
    every = range(play.attempts)
    places = [PlayPlace(task, each + 1, n) for n, task in enumerate(tasks) for each in every]
    scores = [TaskScore(place.name) for place in places[:: play.attempts]]
    try:
        kept = play.out.open("x") if play.out else nullcontext()
    except OSError as error:
        raise CommandError(f"--out: {error}") from error
    with kept as file:

        def take(place: PlayPlace, ended: ModelAttempt) -> None:
            scores[place.index].add_attempt(ended.reward)
            console.print(describe_attempt(place, ended))
            if file is not None:
                line = {"task": place.name, "attempt": place.number, **asdict(ended)}
                file.write(json.dumps(line) + "\n")
                file.flush()

        async with open_model(play.model, console) as endpoint:
            console.print(f"{endpoint.model} plays {len(tasks)} tasks {play.attempts} times")
            players = Players(endpoint, player, play.most_turns, play.concurrency)
            try:
                await players.play(places, take)
            finally:
                for line in format_scores(scores, play.attempts):
                    console.print(line)
    return OK if all(score.graded == play.attempts for score in scores) else FAILED


def describe_attempt(place: PlayPlace, attempt: ModelAttempt) -> str:
    known = f"no grade {attempt.no_grade}" if attempt.reward is None else f"{attempt.reward:g}"
    stopped = f", {attempt.stopped}" if attempt.stopped else ""
    result = one_line(f"{place.name} #{place.number}: {known}{stopped}", _REASON_CHARACTERS)
    return f"{result}  ({attempt.calls} calls, {attempt.seconds:.1f} s)"
