"""`flotilla init`: makes a folder with tasks from somebody's own MCP servers."""

import asyncio
import re
import shlex
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flotilla_common.files.durable_files import sync_path, write_durably
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.tasks.task_checks import Outcome
from flotilla_common.tasks.task_format import read_task
from flotilla_common.text.printable_text import one_line
from flotilla_launcher.cli.adapters.chat_endpoint import ChatEndpoint, EndpointError
from flotilla_launcher.cli.adapters.chosen_model import ChosenModel as ChosenModel
from flotilla_launcher.cli.adapters.chosen_model import open_model
from flotilla_launcher.cli.adapters.gateway_player import GatewayPlayer
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    FAILED,
    OK,
    reports_errors,
    run_interruptible,
)
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_reading.data.check.task_check import check_task
from flotilla_reading.data.check.verdicts import judge_task
from flotilla_reading.own_tools.answer_making import make_answer_tasks
from flotilla_reading.own_tools.exploration import Surroundings, explore
from flotilla_reading.own_tools.folder_files import (
    SPEC,
    STATE,
    TRAIN,
    FolderPlan,
    ServerWish,
    fixed_files,
    server_name,
    solution_of,
    task_fields,
    task_files,
)
from flotilla_reading.own_tools.harder import ask_for_calls, read_calls
from flotilla_reading.own_tools.prose import ask_for_prose, describe_answers, read_prose
from flotilla_reading.own_tools.task_making import (
    MadeTask,
    NotResetError,
    TaskMaker,
    make_tasks,
)
from flotilla_reading.play.ports import EpisodePlayer, PlayError
from flotilla_reading.play.solutions import SolutionCall

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_URL = ("http://", "https://")
_SHOWN = 8
# Of fewer tasks none can be held out.
_FEWEST = 3
# Of the tasks, those whose calls a model is asked for; and the attempts at each of these.
_HARDER_SHARE, _ASKED_EACH = 0.25, 2
_NOT_RESET = (
    "it keeps state outside of the episode's folder: give it a place there, such as --env"
    " DATA_FILE={episode_dir}/data.json, or {episode_dir} in its command"
)
_NO_READERS = (
    "none of its tools says that it only reads (readOnlyHint), so no state can be seen: name those"
    " that do, as in --read-only list_items"
)


@dataclass(frozen=True, slots=True)
class InitWish:
    """What the user has asked for."""

    folder: Path
    mcp: tuple[str, ...]
    state: Path | None
    env: tuple[str, ...]
    key_env: str
    read_only: tuple[str, ...]
    tasks: int
    seed: int
    concurrency: int
    model: ChosenModel | None = None
    # Whether the folder is trained in afterwards.
    trains: bool = False

    @property
    def heldout(self) -> int:
        return (self.tasks + 1) // 2


@reports_errors(bad_spec=BAD_SPEC)
def init_folder(wish: InitWish) -> int:
    """Make the folder, or nothing."""
    console = Terminal(soft_wrap=True)
    plan = _plan_folder(wish)
    target = wish.folder.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(f"{wish.folder} exists and is not empty: choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)

    async def make(interrupts: Interrupts) -> int:
        with scratch_folder(".flotilla-init-", target.parent) as (scratch, _):
            draft = scratch / target.name
            draft.mkdir()
            if wish.state is not None:
                shutil.copytree(wish.state, draft / STATE, symlinks=True)
            done = await interrupts.unless_interrupted(_fill(draft, plan, wish, console))
            sync_path(draft)
            draft.rename(target)
        return done

    return run_interruptible(make)


def _plan_folder(wish: InitWish) -> FolderPlan:
    """Raises CommandError."""
    name = wish.folder.name
    if not _NAME.fullmatch(name):
        raise CommandError(f"{name!r} must be letters, digits, '.', '_' or '-': it names the tasks")
    variables: dict[str, str] = {}
    for each in wish.env:
        found = _VARIABLE.fullmatch(each)
        if found is None:
            raise CommandError(f"--env {each}: write NAME=VALUE")
        variables[found[1]] = found[2]
    common = ServerWish("", read_only=wish.read_only)
    servers: list[ServerWish] = []
    for each in wish.mcp:
        taken = [server.name for server in servers]
        if each.startswith(_URL):
            name_of = server_name(each.split("//", 1)[1], taken)
            servers.append(replace(common, name=name_of, url=each, key_env=wish.key_env))
            continue
        command = _read_command(each)
        if shutil.which(command[0], path=variables.get("PATH")) is None:
            raise CommandError(
                f"--mcp {each}: there is no command {command[0]!r}: install or correct it"
            )
        name_of = server_name(_describe_command(command), taken)
        servers.append(replace(common, name=name_of, command=command, env=variables))
    resets = not any(server.url for server in servers)
    return FolderPlan(name, tuple(servers), wish.state is not None, reuses=True, resets=resets)


def _read_command(text: str) -> tuple[str, ...]:
    """Return the words of a command; files of this folder by their whole path, because the new
    folder is another one. Raises CommandError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CommandError(f"--mcp {text}: {error}") from error
    if not words:
        raise CommandError("--mcp is empty: give a command or a URL")
    return tuple(str(Path(w).absolute()) if "/" in w and Path(w).exists() else w for w in words)


def _describe_command(command: Sequence[str]) -> str:
    """Return what a server may be called: the package or the script, without options."""
    words = [Path(word).name for word in command if not word.startswith("-") and "{" not in word]
    plain = [w for w in words if w not in ("npx", "uvx", "node", "python", "python3", "run", "uv")]
    found = (plain or words)[0]
    if found == "index.js" and len(Path(command[-2]).parts) > 2:
        found = Path(command[1]).parts[-3]
    return found.removeprefix("mcp-").removeprefix("server-").rsplit(".", 1)[0]


async def _fill(draft: Path, plan: FolderPlan, wish: InitWish, console: Terminal) -> int:
    """Write all files of the folder. Raises CommandError."""
    async with AsyncExitStack() as stack:
        chosen = wish.model
        model = await stack.enter_async_context(open_model(chosen, console)) if chosen else None
        for reuses, resets in ((True, True), (False, True), (False, False)):
            tried = replace(plan, reuses=reuses, resets=resets and plan.resets)
            _write_files(draft, fixed_files(tried))
            try:
                async with _open_player(draft, wish, console) as player:
                    return await _fill_tasks(draft, tried, player, model, wish, console)
            except NotResetError as error:
                console.print(f"an episode does not begin as the first one did: {error}")
                without = f"no task can change it: {_NOT_RESET}"
                console.print("its processes keep state" if reuses else without)
            except PlayError as error:
                raise CommandError(str(error)) from error
    raise AssertionError


@asynccontextmanager
async def _open_player(
    draft: Path, wish: InitWish, console: Terminal
) -> AsyncGenerator[EpisodePlayer]:
    spec = draft / SPEC
    overrides = [
        f"--env_gateway.warm_starts.size={wish.concurrency}",
        "--env_gateway.warm_starts.starts_per_s=20",
        "--env_gateway.verifiers.attempts=1",
    ]
    console.print("starting a gateway", style="dim")
    async with open_gateway(spec, overrides) as stub:
        yield GatewayPlayer(stub, gateway_section(spec, overrides), "init")


async def _fill_tasks(
    draft: Path,
    plan: FolderPlan,
    player: EpisodePlayer,
    model: ChatEndpoint | None,
    wish: InitWish,
    console: Terminal,
) -> int:
    """Make tasks and write their files; return the exit code. Raises NotResetError and
    PlayError."""
    found = await explore(player, plan.name, draft / STATE if plan.has_state else None, wish.seed)
    _show_tools(found, console)
    making = _Making(player, found, plan, model, wish, console)
    made = await making.make_state_tasks()
    if len(made) < _FEWEST:
        made = await making.make_answer_tasks()
    if made:
        made = await making.rewrite(made)
    making.show_dropped()
    if len(made) < _FEWEST:
        console.print(f"no tasks: {making.why_none()}")
        console.print(f"{wish.folder} holds all but tasks; remove it before the next try")
        return FAILED
    heldout = min(wish.heldout, len(made) // 3)
    _write_files(draft, task_files(plan.name, found.tools, made, heldout, wish.seed))
    console.print(f"{len(made) - heldout} tasks to train on, {heldout} held out, in {wish.folder}")
    if not wish.trains:
        console.print(f"to play one:  cd {wish.folder} && flotilla env try {SPEC} {TRAIN}")
        console.print(f"to train a tiny policy here:  flotilla init {wish.folder} --train")
    return OK


class _Making:
    """Makes and checks the tasks of an environment, and says what became of the others."""

    def __init__(
        self,
        player: EpisodePlayer,
        found: Surroundings,
        plan: FolderPlan,
        model: ChatEndpoint | None,
        wish: InitWish,
        console: Terminal,
    ) -> None:
        self._player, self._found, self._plan, self._model = player, found, plan, model
        self._wish, self._console = wish, console
        self._wanted = wish.tasks + wish.heldout
        self._places = asyncio.Semaphore(wish.concurrency)
        self._dropped: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    async def make_state_tasks(self) -> list[MadeTask]:
        """Make tasks that are graded by the state that they end in; none if no state can be seen,
        changed or brought back."""
        found = self._found
        if not (self._plan.resets and found.probes and found.writers):
            return []
        maker = TaskMaker(self._player, found, self._wish.seed, self._wish.concurrency)
        with self._console.status(f"0 of {self._wanted} tasks are made") as status:

            def show(count: int) -> None:
                status.update(f"{count} of {self._wanted} tasks are made")

            harder = await self._make_harder(maker)
            made = await make_tasks(maker, self._wanted - len(harder), self._check, show)
        self._dropped += maker.log.dropped
        return [*harder, *made]

    async def _make_harder(self, maker: TaskMaker) -> list[MadeTask]:
        """Make tasks of the calls that the model names; none without a model."""
        endpoint, wanted = self._model, int(_HARDER_SHARE * self._wanted)
        if endpoint is None:
            return []
        failed: Counter[str] = Counter()

        async def ask(number: int) -> list[SolutionCall]:
            text = await self._ask(endpoint, ask_for_calls(self._found, number), failed)
            calls = [] if text is None else read_calls(text, self._found)
            if isinstance(calls, str):
                failed[calls] += 1
                return []
            return calls

        proposed = await asyncio.gather(*map(ask, range(_ASKED_EACH * wanted)))
        made = await self._check(await maker.make_proposed([calls for calls in proposed if calls]))
        kept = f"tasks of the model's calls: {len(made[:wanted])}, asked for {len(proposed)}"
        self._console.print(describe_answers(kept, failed))
        return made[:wanted]

    async def make_answer_tasks(self) -> list[MadeTask]:
        """Make tasks that are graded by the final answer."""
        self._console.print("tasks ask what tools answer: no state can be graded here")
        wish = self._wish
        made = await make_answer_tasks(self._player, self._found, self._wanted, wish.seed)
        return await self._check(made)

    async def rewrite(self, tasks: Sequence[MadeTask]) -> list[MadeTask]:
        """Return the tasks in the words of the model, where these say the same and the task stays
        valid; the others as they are, and all without a model."""
        endpoint = self._model
        if endpoint is None:
            return list(tasks)
        failed: Counter[str] = Counter()

        async def ask(task: MadeTask) -> MadeTask:
            text = await self._ask(endpoint, ask_for_prose(task), failed)
            if text is None:
                return task
            prose = read_prose(text, task)
            failed["they lost a value, or are no plain text"] += prose is None
            return task if prose is None else replace(task, prompt=prose)

        written = await asyncio.gather(*map(ask, tasks))
        changed = [new for old, new in zip(tasks, written, strict=True) if new is not old]
        # Two that are alike now stay as they were.
        told = Counter(task.prompt for task in written)
        valid = {t.prompt for t in await self._check([c for c in changed if told[c.prompt] == 1])}
        kept = [new.prompt in valid for new in written]
        rewritten = f"prompts in the model's words: {sum(kept)} of {len(tasks)}"
        self._console.print(describe_answers(rewritten, +failed))
        return [new if keep else old for old, new, keep in zip(tasks, written, kept, strict=True)]

    async def _ask(
        self, endpoint: ChatEndpoint, messages: Sequence[dict[str, str]], failed: Counter[str]
    ) -> str | None:
        """Return what the model says; None, and the reason in `failed`, if it does not answer."""
        async with self._places:
            try:
                return (await endpoint.answer_messages(messages, ())).text
            except EndpointError as error:
                failed[one_line(str(error), 160)] += 1
                return None

    async def _check(self, tasks: Sequence[MadeTask]) -> list[MadeTask]:
        """Return the tasks that `flotilla data check` would call valid."""
        env = self._plan.name

        async def check_one(number: int, made: MadeTask) -> bool:
            fields = task_fields(env, f"{env}-{number}", made)
            solution = solution_of(fields["key"], made)
            async with self._places:
                checks = await check_task(self._player, read_task(fields), fields, solution)
            if (verdict := judge_task(checks)) is Outcome.VALID:
                return True
            why = next(each.detail for each in checks.values() if each.outcome is verdict)
            self._refused[one_line(why, 160)] += 1
            return False

        valid = await asyncio.gather(*(check_one(*each) for each in enumerate(tasks)))
        return [made for made, is_valid in zip(tasks, valid, strict=True) if is_valid]

    def show_dropped(self) -> None:
        """Print what became of the calls that are no tasks."""
        for what, counts in (("not made", self._dropped), ("not valid", self._refused)):
            for reason, count in counts.most_common(_SHOWN):
                self._console.print(one_line(f"{what}: {count}: {reason}", 200))

    def why_none(self) -> str:
        """Return why there are no tasks, and what the user can do about it."""
        if not self._found.readers:
            return _NO_READERS
        if self._plan.resets and self._found.writers:
            return "nothing that its tools change can be seen by those that only read"
        return "what its tools answer does not repeat, or can be known without them"


def _show_tools(found: Surroundings, console: Terminal) -> None:
    readers, writers = found.readers, found.writers
    console.print(f"{len(found.tools)} tools: {len(readers)} only read, {len(writers)} write")
    for tools, what in ((readers, "reads"), (writers, "writes")):
        if tools:
            console.print(f"{what:8} {', '.join(tool.name for tool in tools)}")
    for name in found.left_alone:
        console.print(
            f"left alone, for its name is none that a model can write: {one_line(name, 80)}"
        )
    console.print(f"{len(found.probes)} probes show the state of an untouched instance")


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
