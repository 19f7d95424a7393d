"""`flotilla init`: makes a folder with tasks from somebody's own MCP servers."""

import asyncio
import re
import shlex
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.files.durable_files import sync_path, write_durably
from services.common.files.scratch_folders import scratch_folder
from services.common.tasks.task_checks import Outcome
from services.common.tasks.task_format import read_task
from services.common.text.printable_text import one_line
from services.launcher.cli.adapters.gateway_player import GatewayPlayer
from services.launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from services.launcher.cli.command_runner import (
    BAD_SPEC,
    OK,
    reports_errors,
    run_interruptible,
)
from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.terminal import CommandError, Terminal
from services.reading.data.check.task_check import check_task
from services.reading.data.check.verdicts import judge_task
from services.reading.own_tools.exploration import Surroundings, explore
from services.reading.own_tools.folder_files import (
    SPEC,
    STATE,
    FolderPlan,
    ServerWish,
    fixed_files,
    server_name,
    solution_of,
    task_fields,
    task_files,
)
from services.reading.own_tools.task_making import (
    MadeTask,
    NotResetError,
    TaskMaker,
    make_tasks,
)
from services.reading.play.ports import EpisodePlayer, PlayError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_URL = ("http://", "https://")
_SHOWN = 8
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
    servers: list[ServerWish] = []
    for each in wish.mcp:
        taken = [server.name for server in servers]
        if each.startswith(_URL):
            name_of = server_name(each.split("//", 1)[1], taken)
            servers.append(ServerWish(name_of, url=each, key_env=wish.key_env))
            continue
        command = _read_command(each)
        name_of = server_name(_describe_command(command), taken)
        servers.append(ServerWish(name_of, command, env=variables))
    return FolderPlan(name, tuple(servers), wish.state is not None, reuses=True)


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
    """Write all files of the folder. Raises CommandError and PlayError."""
    for reuses in (True, False):
        tried = replace(plan, reuses=reuses)
        _write_files(draft, fixed_files(tried))
        try:
            async with _open_player(draft, wish, console) as player:
                return await _fill_tasks(draft, tried, player, wish, console)
        except NotResetError as error:
            console.print(f"not like the first episode: {error}")
            if not reuses:
                raise CommandError(
                    f"a new process of the server is not as the first: {_NOT_RESET}"
                ) from error
            console.print("its processes keep state: each serves one episode")
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
    draft: Path, plan: FolderPlan, player: EpisodePlayer, wish: InitWish, console: Terminal
) -> int:
    state = draft / STATE if plan.has_state else None
    found = await explore(player, plan.name, state, wish.seed)
    _show_tools(found, console)
    if not found.readers:
        raise CommandError(_NO_READERS)
    maker = TaskMaker(player, found, wish.seed, wish.concurrency)
    refused: Counter[str] = Counter()
    wanted, places = wish.tasks + wish.heldout, asyncio.Semaphore(wish.concurrency)
    with console.status(f"0 of {wanted} tasks are made") as status:
        made = await make_tasks(
            maker,
            wanted,
            lambda tasks: _check(player, plan.name, tasks, refused, places),
            lambda count: status.update(f"{count} of {wanted} tasks are made"),
        )
    _show_dropped(maker, refused, console)
    if len(made) < 3:
        raise CommandError(
            f"only {len(made)} tasks could be made of {len(found.writers)} tools that write"
        )
    heldout = min(wish.heldout, len(made) // 3)
    _write_files(draft, task_files(plan.name, found.tools, made, heldout, wish.seed))
    console.print(f"{len(made) - heldout} tasks to train on, {heldout} held out, in {wish.folder}")
    return OK


async def _check(
    player: EpisodePlayer,
    env: str,
    tasks: Sequence[MadeTask],
    refused: Counter[str],
    places: asyncio.Semaphore,
) -> list[MadeTask]:
    """Return the tasks that `flotilla data check` would call valid."""

    async def check_one(number: int, made: MadeTask) -> bool:
        fields = task_fields(env, f"{env}-{number}", made)
        solution = solution_of(fields["key"], made)
        async with places:
            checks = await check_task(player, read_task(fields), fields, solution)
        if (verdict := judge_task(checks)) is Outcome.VALID:
            return True
        why = next(each.detail for each in checks.values() if each.outcome is verdict)
        refused[one_line(why, 160)] += 1
        return False

    valid = await asyncio.gather(*(check_one(*each) for each in enumerate(tasks)))
    return [made for made, is_valid in zip(tasks, valid, strict=True) if is_valid]


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


def _show_dropped(maker: TaskMaker, refused: Counter[str], console: Terminal) -> None:
    for what, counts in (("not made", maker.log.dropped), ("not valid", refused)):
        for reason, count in counts.most_common(_SHOWN):
            console.print(one_line(f"{what}: {count}: {reason}", 200))


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
