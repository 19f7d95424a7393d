"""A model's play of several tasks: all attempts, concurrently, and their scores."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.aio.concurrency import raise_failure, running_tasks
from services.common.domain.even_spread import spread_evenly
from services.common.text.printable_text import one_line
from services.launcher.cli.adapters.chosen_model import ChosenModel, open_model
from services.launcher.cli.adapters.model_attempts import ModelAttempt, play_attempt
from services.launcher.cli.command_runner import FAILED, OK
from services.launcher.cli.task_scores import TaskScore, format_scores
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.doctor.dataset import env_key_of, key_of
from services.reading.play.ports import EpisodePlayer

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


async def play_tasks(
    player: EpisodePlayer,
    tasks: Sequence[Mapping[str, Any]],
    play: ModelPlay,
    console: Terminal,
) -> int:
    """Play all attempts; print each as it ends, and then the scores, also after Ctrl-C. Return the
    exit code. `section` is the gateway's. Raises CommandError."""
    tasks = spread_evenly(tasks, play.limit, group_of=env_key_of, key_of=key_of)
    scores = [TaskScore(key_of(task) or f"task {n}") for n, task in enumerate(tasks)]
    waiting = iter([(n, number) for n in range(len(tasks)) for number in range(play.attempts)])
    try:
        kept = play.out.open("x") if play.out else nullcontext()
    except OSError as error:
        raise CommandError(f"--out: {error}") from error
    with kept as file:
        async with open_model(play.model, console) as endpoint:

            async def play_waiting() -> None:
                for n, number in waiting:
                    ended = await play_attempt(player, tasks[n], endpoint, play.most_turns)
                    scores[n].add_attempt(ended.reward)
                    console.print(_describe_attempt(scores[n].key, number, ended))
                    if file is not None:
                        line = {"task": scores[n].key, "attempt": number + 1, **asdict(ended)}
                        file.write(json.dumps(line) + "\n")
                        file.flush()

            console.print(f"{endpoint.model} plays {len(tasks)} tasks {play.attempts} times")
            try:
                workers = min(play.concurrency, len(tasks) * play.attempts)
                async with running_tasks(*(play_waiting() for _ in range(workers))) as running:
                    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                    raise_failure(running)
            finally:
                for line in format_scores(scores, play.attempts):
                    console.print(line)
    return OK if all(score.graded == play.attempts for score in scores) else FAILED


def _describe_attempt(key: str, number: int, attempt: ModelAttempt) -> str:
    known = f"no grade {attempt.no_grade}" if attempt.reward is None else f"{attempt.reward:g}"
    stopped = f", {attempt.stopped}" if attempt.stopped else ""
    result = one_line(f"{key} #{number + 1}: {known}{stopped}", _REASON_CHARACTERS)
    return f"{result}  ({attempt.calls} calls, {attempt.seconds:.1f} s)"
