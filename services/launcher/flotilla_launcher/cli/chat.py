"""`flotilla chat`: a conversation with a model that has the tools of a run's environment."""

import asyncio
import shlex
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.tasks.task_files import TaskFileError, read_objects
from flotilla_launcher.cli.adapters.chat_conversation import HELP, ChatConversation
from flotilla_launcher.cli.adapters.chosen_model import ChosenModel as ChosenModel
from flotilla_launcher.cli.adapters.chosen_model import is_url, open_model
from flotilla_launcher.cli.adapters.gateway_player import PERSON_S, GatewayPlayer
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from flotilla_launcher.cli.command_runner import BAD_SPEC, FAILED, INTERRUPTED, OK, reports_errors
from flotilla_launcher.cli.eval_sources import find_model, find_run
from flotilla_launcher.cli.interrupts import InterruptedByUserError
from flotilla_launcher.cli.serve import find_served_run
from flotilla_launcher.cli.standard_input import open_standard_input
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.cli.turn_interrupts import TurnInterrupts
from flotilla_launcher.doctor.dataset import env_key_of, key_of
from flotilla_reading.play.ports import PlayError

_AGAIN = "Ctrl-C again ends the conversation"
_SHOWN_KEYS = 5


@dataclass(frozen=True, slots=True)
class ChatWish:
    """What to talk with, and about what. `source` is `RUN`, `RUN@STEP` or a run spec; without a
    model of its own in `model`, the run's is served here. The world is that of the task `key`, with
    which the conversation begins, or of the first task, of `env` if that is given."""

    source: str
    model: ChosenModel
    tasks: Path | None
    key: str
    env: str
    most_turns: int


@reports_errors(bad_spec=BAD_SPEC)
def chat(wish: ChatWish, runs: Path) -> int:
    """Hold the conversation; return the exit code."""
    spec, model = Path(wish.source), wish.model
    if not spec.is_file():
        found = find_run(wish.source, runs)
        if found is None:
            raise CommandError(
                f"{wish.source!r} is neither a run spec nor a run in {runs} (RUN, or RUN@STEP);"
                " `flotilla status` lists them"
            )
        spec = found[0] / "spec.json"
    elif not model.model:
        raise CommandError(f"{spec} is a run spec: name what to talk with, --model URL|NAME")
    task = find_task(load_spec(spec), wish.tasks, wish.key, wish.env)
    if not model.model:
        served = find_served_run(wish.source, runs)
        words = [shlex.join(served.options()), model.vllm_args]
        model = replace(model, model=str(served.folder), vllm_args=" ".join(words))
    serving = nullcontext(model.model) if is_url(model.model) else find_model(model.model, runs)
    with serving as name:
        return asyncio.run(_chat(wish, replace(model, model=name), spec, task))


def find_task(spec: Mapping[str, Any], tasks: Path | None, key: str, env: str) -> dict[str, Any]:
    """Return the task `key`, or the first one, of an environment if it is named; of a file, or of
    those that a spec names. Raises CommandError."""
    paths = [tasks] if tasks else list(dict.fromkeys(_list_task_files(spec)))
    if not paths:
        raise CommandError("the spec names no tasks, whose environment to open: pass --tasks FILE")
    known: list[dict[str, Any]] = []
    for path in paths:
        try:
            known += read_objects(path)
        except TaskFileError as error:
            raise CommandError(f"{error}; --tasks FILE names another file") from error
    of_env = [task for task in known if not env or env_key_of(task) == env]
    if found := [task for task in of_env if not key or key_of(task) == key]:
        return found[0]
    files = ", ".join(map(str, paths))
    if not of_env:
        envs = ", ".join(sorted({env_key_of(task) for task in known})) or "none"
        raise CommandError(f"no task of {files} is of the environment {env!r}; they are of: {envs}")
    keys = ", ".join(key_of(task) for task in of_env[:_SHOWN_KEYS])
    raise CommandError(f"no task of {files} has the key {key!r}; the first have: {keys}")


def _list_task_files(spec: Mapping[str, Any]) -> Iterator[Path]:
    learner = spec.get("learner", {})
    for each in learner.get("eval", {}).get("sets", ()):
        yield Path(each["tasks"])
    if learner.get("tasks"):
        yield Path(learner["tasks"])


async def _chat(wish: ChatWish, model: ChosenModel, spec: Path, task: Mapping[str, Any]) -> int:
    console = Terminal(soft_wrap=True)
    interrupts = TurnInterrupts(lambda: console.print(_AGAIN, style="dim"))
    with interrupts.catch_signals():
        try:
            talk = _talk(wish, model, spec, task, interrupts, console)
            return await interrupts.unless_ended(talk)
        except InterruptedByUserError:
            return INTERRUPTED


async def _talk(
    wish: ChatWish,
    model: ChosenModel,
    spec: Path,
    task: Mapping[str, Any],
    interrupts: TurnInterrupts,
    console: Terminal,
) -> int:
    section = gateway_section(spec, ())
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(open_model(model, console))
        console.print("starting a gateway", style="dim")
        stub = await stack.enter_async_context(open_gateway(spec, ()))
        player = GatewayPlayer(stub, section, "chat", PERSON_S)
        console.print(f"{endpoint.model} has the tools of {env_key_of(task)}. {HELP}")
        lines, again, code = open_standard_input(), True, OK
        while again:
            try:
                async with player.open_episode(task) as episode:
                    talk = ChatConversation(
                        *(episode, endpoint, wish.most_turns, interrupts, console),
                        graded=bool(wish.key),
                    )
                    again = await talk.hold(lines, episode.opening.task if wish.key else "")
                    if wish.key and not again:
                        await talk.end()
                        graded = talk.grade is not None and talk.grade.reward is not None
                        code = OK if graded else FAILED
            except PlayError as error:
                raise CommandError(f"{error}; the same command opens another one") from error
        return code
