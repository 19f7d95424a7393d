"""`flotilla data collect`: plays tasks by a teacher or from recordings, and keeps some of them."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flotilla_common.process.extras import install_command
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.tasks.task_files import accept_rows, parse_rows, read_bytes
from flotilla_common.text.printable_text import one_line
from flotilla_launcher.cli.adapters.chat_endpoint import Patience
from flotilla_launcher.cli.adapters.chosen_model import ChosenModel, open_model
from flotilla_launcher.cli.adapters.gateway_player import GatewayPlayer
from flotilla_launcher.cli.adapters.ledgered_model import Teacher
from flotilla_launcher.cli.adapters.model_attempts import offer_tool
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway, paid_backend
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    FAILED,
    OK,
    reports_errors,
    run_until_interrupted,
)
from flotilla_launcher.cli.data_views import print_fates, reports_data_errors
from flotilla_launcher.cli.run_source import find_run_dir
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.data.collect.budget import Limits, Prices, RequestPace
from flotilla_reading.data.collect.collected_folder import count_fates, write_collection
from flotilla_reading.data.collect.collection import (
    Collection,
    Plan,
    SourceTask,
    to_source_task,
)
from flotilla_reading.data.collect.fates import Fate, Rules, Verdict
from flotilla_reading.data.collect.ledger import Ledger, Try, open_ledger
from flotilla_reading.data.collect.recorded_episodes import (
    RecordedEpisode,
    read_episodes,
    to_episode,
)
from flotilla_reading.data.dataset_folder import origin_of, refuse_inside
from flotilla_reading.data.entries import DataError
from flotilla_reading.trajectory_export import TrajectoryExportError, open_episodes

# An endpoint that limits rates is waited for.
_RETRIES, _RETRIES_S = 8, 3600.0
# Reasons that are printed, and their length.
_SHOWN, _REASON_CHARACTERS = 5, 300
_NO_BUDGET = "the teacher has no budget: --max-calls, --max-tokens or --max-cost sets one"
_FILES = "tasks.jsonl, solutions.jsonl, demonstrations.jsonl, evidence.jsonl"


@dataclass(frozen=True, slots=True)
class Sources:
    """The spec of the environments with its overrides, the tasks, and recorded episodes: files, or
    runs in the folder `runs`."""

    spec: Path
    overrides: Sequence[str]
    tasks: Path
    episodes: Sequence[str]
    runs: Path


@dataclass(frozen=True, slots=True)
class TeacherWish:
    """The teacher, how often and how fast it is asked, and what it may cost."""

    model: ChosenModel
    tries: int
    most_turns: int
    answer_s: float
    per_minute: float | None
    limits: Limits
    prices: Prices


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """Where tasks come from and go to, and how they are judged."""

    sources: Sources
    out: Path
    rules: Rules
    concurrency: int
    retry: bool


@reports_errors(bad_spec=BAD_SPEC)
@reports_data_errors
def collect_tasks(options: CollectOptions, wish: TeacherWish | None) -> int:
    """Collect, and print what became of the source's tasks; also after Ctrl-C."""
    _check(options, wish)
    console = Terminal(soft_wrap=True)
    source = options.sources.tasks
    data = read_bytes(source)
    tasks = [to_source_task(read) for read in accept_rows(parse_rows(data, source), source)]
    origin = origin_of(source, data)
    with open_ledger(options.out) as ledger:
        _add_episodes(options.sources, tasks, ledger, console)
        plan = Plan(wish.tries if wish else 0, options.rules, options.retry)
        collection = Collection(tasks, ledger, plan)
        ended = run_until_interrupted(_collect(collection, options, wish, console))
        prices = wish.prices if wish else Prices()
        verdicts = write_collection(options.out, collection, origin, prices)
        print_fates(count_fates(verdicts), (Fate.KEPT,), list(Fate)[1:], console)
        _print_reasons([verdict for _, verdict in verdicts], console)
        _print_end(collection, prices, console)
        console.print(f"Wrote {_FILES} and manifest.json to {options.out}")
    undecided = any(verdict.fate is Fate.UNDECIDED for _, verdict in verdicts)
    return ended or (FAILED if undecided else OK)


def _check(options: CollectOptions, wish: TeacherWish | None) -> None:
    """Raise DataError for options that cannot lead to a task."""
    rules, sources = options.rules, options.sources
    for name in (str(sources.tasks), *sources.episodes):
        # Episodes of this folder are counted already.
        refuse_inside(name, options.out)
    if rules.least > rules.most:
        raise DataError("--min-pass-rate is more than --max-pass-rate, so no task could be kept")
    if wish and wish.tries < rules.min_graded and not sources.episodes:
        raise DataError(
            f"--tries {wish.tries} is less than --min-graded {rules.min_graded}, so no task could"
            " be judged"
        )
    if wish and wish.limits.cost is not None and not (wish.prices.prompt or wish.prices.completion):
        raise DataError("--max-cost needs --price-in and --price-out")


def _add_episodes(
    sources: Sources, tasks: Sequence[SourceTask], ledger: Ledger, console: Terminal
) -> None:
    digests = {task.key: task.digest for task in tasks}
    for name in sources.episodes:
        path = Path(name)
        found = _read_file(path) if path.is_file() else _read_run(name, sources.runs)
        if others := ledger.add_episodes(found, digests):
            console.print(f"{name}: episodes of tasks that the source lacks: {others}")


def _read_file(path: Path) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a file. Raises DataError."""
    if path.suffix != ".parquet":
        yield from read_episodes(path)
        return
    try:
        from flotilla_reading.adapters.parquet_files import read_conversations
    except ImportError as error:
        raise DataError(f"{path}: {error}: install it: {install_command('export')}") from error
    try:
        yield from map(to_episode, read_conversations(path))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _read_run(run: str, runs: Path) -> Iterator[RecordedEpisode]:
    """Yield all episodes of a run whose tokens are kept. Raises DataError."""
    try:
        with open_episodes(find_run_dir(run, runs)) as (_, episodes):
            for row in episodes.find_rows(AttemptFilter()):
                if row is not None:
                    yield to_episode(row)
    except (TrajectoryExportError, JournalError, ValueError) as error:
        raise DataError(f"--episodes {run}: {error}") from error
    except CommandError as error:
        raise DataError(f"--episodes {run} is no file, and {error}") from error


async def _collect(
    collection: Collection, options: CollectOptions, wish: TeacherWish | None, console: Terminal
) -> None:
    sources, ledger = options.sources, collection.ledger
    tries = sum(len(collection.open_places(task)) for task in collection.tasks)
    replays = sum(len(collection.find_replays(task)) for task in collection.tasks)
    if not tries and not replays:
        return
    if wish and tries:
        patience = Patience(wish.answer_s, _RETRIES, _RETRIES_S)
        opening = open_model(wish.model, console, patience)
    else:
        opening = nullcontext()
    section = gateway_section(sources.spec, sources.overrides)
    console.print("starting a gateway", style="dim")
    async with open_gateway(sources.spec, sources.overrides) as stub, opening as endpoint:
        player, teacher = GatewayPlayer(stub, section, "data-collect"), None
        if wish and endpoint:
            teacher = Teacher(
                *(endpoint, ledger, wish.limits, wish.prices),
                RequestPace(wish.per_minute),
                wish.most_turns,
            )
            heat = wish.model.temperature
            ledger.settle(
                {
                    "--teacher-model": endpoint.model,
                    "--temperature": "by default" if heat is None else f"{heat:g}",
                    "--max-turns": str(wish.most_turns),
                }
            )

        async def play_try(task: SourceTask, one: Try) -> None:
            # Without a teacher, no place for its tries is open.
            assert teacher is not None
            await teacher.play_try(player, task, one)

        _print_extent(collection, tries, replays, section, console)
        if wish and tries and wish.limits == Limits():
            console.print(_NO_BUDGET)
        with _showing_progress(collection, console) as show:
            await collection.run(player, play_try, offer_tool, options.concurrency, show)


def _print_extent(
    collection: Collection,
    tries: int,
    replays: int,
    section: Mapping[str, Any],
    console: Terminal,
) -> None:
    """Print what is about to be done, and what of it has a price."""
    tasks = collection.tasks
    console.print(f"tasks: {len(tasks)}, tries: {tries}, replays: at most {tries + replays}")
    paid: Counter[str] = Counter()
    for task in tasks:
        if backend := paid_backend(section, task.env_key):
            # Every try may be replayed.
            tried, passed = collection.open_places(task), collection.find_replays(task)
            paid[backend] += 2 * len(tried) + len(passed)
    for backend, instances in paid.items():
        console.print(
            f"{backend} charges for instances; this opens at most {instances} of them. Ctrl-C stops"
            " it, and what has ended is kept"
        )


@contextmanager
def _showing_progress(
    collection: Collection, console: Terminal
) -> Generator[Callable[[SourceTask], object]]:
    """Show a bar of tasks on a terminal; yield what moves it."""
    fates = {task.digest: collection.verdict_of(task).fate for task in collection.tasks}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        shown = bar.add_task("tasks decided", total=len(fates))

        def show(task: SourceTask) -> None:
            fates[task.digest] = collection.verdict_of(task).fate
            if bar.disable:
                return
            counts = Counter(fates.values())
            text = f"{counts[Fate.KEPT]} kept, {collection.ledger.spent.calls} requests"
            decided = len(fates) - counts[Fate.UNDECIDED]
            bar.update(shown, completed=decided, description=text)

        yield show


def _print_reasons(verdicts: Sequence[Verdict], console: Terminal) -> None:
    """Print why tasks are undecided or cannot be replayed, the commonest reasons first."""
    unclear = (Fate.UNDECIDED, Fate.NOT_REPLAYED)
    counts = Counter((each.fate, each.reason) for each in verdicts if each.fate in unclear)
    for (fate, reason), count in counts.most_common(_SHOWN):
        console.print(one_line(f"{fate}: {reason} (tasks: {count})", _REASON_CHARACTERS))


def _print_end(collection: Collection, prices: Prices, console: Terminal) -> None:
    """Print what the teacher has cost, and what is left to do."""
    spent = collection.ledger.spent
    if spent.calls:
        cost = f", cost: {spent.cost(prices):.4f}" if prices != Prices() else ""
        unknown = f", requests with unknown tokens: {spent.unknown}" if spent.unknown else ""
        console.print(
            f"requests: {spent.calls}, tokens of prompts: {spent.prompt}, of answers:"
            f" {spent.completion}{cost}{unknown}"
        )
    left = sum(len(collection.open_places(task)) for task in collection.tasks)
    if collection.stopped:
        console.print(f"stopped: {collection.stopped}")
    if left:
        console.print(f"tries left: {left}; the same command goes on with them")
    if ungraded := sum(map(collection.count_ungraded, collection.tasks)):
        console.print(
            f"tries and replays without a grade: {ungraded}; --retry-ungraded makes them once more"
        )
