"""A model's play of several tasks: all attempts, concurrently, and their scores."""

import asyncio
import json
import os
import shlex
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.aio.concurrency import raise_failure, running_tasks
from services.common.domain.even_spread import spread_evenly
from services.common.text.printable_text import one_line
from services.launcher.cli.adapters.chat_endpoint import ChatEndpoint, open_endpoint
from services.launcher.cli.adapters.model_attempts import ModelAttempt, play_attempt
from services.launcher.cli.adapters.vllm_server import serve_model
from services.launcher.cli.command_runner import FAILED, OK
from services.launcher.cli.task_scores import TaskScore, format_scores
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.doctor.dataset import env_key_of, key_of
from services.reading.play.ports import EpisodePlayer

_URL = ("http://", "https://")
# Host of a server that listens on a socket of this machine.
_LOCAL_URL = "http://localhost/v1"
_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class ModelPlay:
    """A play by `model`: the URL of an endpoint, of which `name` is a model, or a model that vLLM
    serves here. `key_env` names the variable with the endpoint's key."""

    model: str
    name: str
    key_env: str
    attempts: int
    concurrency: int
    limit: int | None
    most_turns: int
    temperature: float | None
    vllm_args: str
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
        options = shlex.split(play.vllm_args)
        kept = play.out.open("x") if play.out else nullcontext()
    except ValueError as error:
        raise CommandError(f"--vllm-args: {error}") from error
    except OSError as error:
        raise CommandError(f"--out: {error}") from error
    with kept as file:
        async with _open_model(play, options, console) as endpoint:

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


@asynccontextmanager
async def _open_model(
    play: ModelPlay, options: Sequence[str], console: Terminal
) -> AsyncGenerator[ChatEndpoint]:
    """Connect to the model, served here if it is no URL. Raises CommandError."""

    def show_progress(text: str) -> None:
        console.print(text, style="dim")

    url, key, socket = play.model, os.environ.get(play.key_env, "").strip(), None
    async with AsyncExitStack() as stack:
        if not url.startswith(_URL):
            # The key is for others than this server.
            url, key = _LOCAL_URL, ""
            serving = serve_model(play.model, options, show_progress)
            socket = await stack.enter_async_context(serving)
        opening = open_endpoint(
            url, model=play.name, key=key, temperature=play.temperature, socket=socket
        )
        yield await stack.enter_async_context(opening)


def _describe_attempt(key: str, number: int, attempt: ModelAttempt) -> str:
    known = f"no grade {attempt.no_grade}" if attempt.reward is None else f"{attempt.reward:g}"
    stopped = f", {attempt.stopped}" if attempt.stopped else ""
    result = one_line(f"{key} #{number + 1}: {known}{stopped}", _REASON_CHARACTERS)
    return f"{result}  ({attempt.calls} calls, {attempt.seconds:.1f} s)"
