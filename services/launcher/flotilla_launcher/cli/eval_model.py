"""`flotilla eval --model`: tasks played by any model, through a gateway of its own; and
`flotilla eval --against`, which compares two evaluations."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from flotilla_common.domain.eval_groups import MAIN_SET
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.tasks.task_files import ReadTask
from flotilla_common.text.redaction import redact
from flotilla_launcher.cli.adapters.chosen_model import ChosenModel as ChosenModel
from flotilla_launcher.cli.adapters.chosen_model import is_url, open_model
from flotilla_launcher.cli.adapters.gateway_player import GatewayPlayer
from flotilla_launcher.cli.adapters.model_attempts import ENDPOINT_FAILED, ModelAttempt
from flotilla_launcher.cli.adapters.model_play import Players, PlayPlace, describe_attempt
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    FAILED,
    INTERRUPTED,
    OK,
    reports_errors,
    run_until_interrupted,
)
from flotilla_launcher.cli.data_views import reports_data_errors
from flotilla_launcher.cli.eval_sources import find_model, identify_model, read_finished
from flotilla_launcher.cli.eval_views import (
    NamedAttempts,
    draw_scores,
    find_common,
    show_evaluations,
)
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.doctor.dataset import env_key_of
from flotilla_reading.data.dataset_folder import PARTS, read_parts
from flotilla_reading.data.entries import DataError
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt
from flotilla_reading.evaluation.results_folder import (
    MANIFEST,
    PLOT,
    EvaluationSettings,
    RecordedAttempt,
    ResultsFolder,
    open_results,
    read_results,
)

_FOLDER = Path("evaluations")
_MOST_FAILURES = 10


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """What is played by which model, and where the results are kept. Without `tasks` it is the
    spec's held-out set."""

    spec: Path
    overrides: Sequence[str]
    tasks: Path | None
    model: ChosenModel
    attempts: int
    max_turns: int
    concurrency: int
    out: Path | None

    @property
    def folder(self) -> Path:
        # A URL may hold a password.
        name = f"{self.spec.stem}-{redact(self.model.model)}-{self.model.name}"
        return self.out or _FOLDER / re.sub(r"[^A-Za-z0-9.@]+", "-", name).strip("-.")


@reports_errors(bad_spec=BAD_SPEC)
@reports_data_errors
def evaluate_models(
    wishes: Sequence[ModelEvaluation], runs: Path, against: str | None, *, as_json: bool
) -> int:
    """Evaluate models one after another, each from where it ended before; print their scores, and
    compare the last one. One of several that fails is shown as failed, and the others are made.
    The progress is on standard error."""
    progress = Terminal(soft_wrap=True, stderr=True)
    first = None if against is None else _read(against, runs, wishes[-1].attempts)
    # All mistakes in a suite are found before anything is paid for.
    planned = [(wish, _read_tasks(wish)) for wish in wishes]
    if first is not None:
        last = _name(*planned[-1])
        find_common(first, last, last.digests)
    evaluate = _evaluate if len(wishes) == 1 else _evaluate_or_explain
    codes: list[int] = []
    shown: list[NamedAttempts] = []
    for wish, tasks in planned:
        code, found = evaluate(wish, tasks, runs, progress)
        codes.append(code)
        shown.append(found)
        if code == INTERRUPTED:
            show_evaluations(shown, None, as_json=as_json)
            return INTERRUPTED
    codes.append(show_evaluations(shown, first, as_json=as_json))
    drawn = wishes[0].folder if len(wishes) == 1 else wishes[0].folder.parent
    draw_scores(drawn / PLOT, [*filter(None, [first]), *shown])
    return max(codes)


@reports_errors(bad_spec=BAD_SPEC)
@reports_data_errors
def compare_evaluations(target: str, runs: Path, against: str, *, as_json: bool) -> int:
    """Compare two finished evaluations."""
    return show_evaluations([_read(target, runs, 1)], _read(against, runs, 1), as_json=as_json)


def _read(text: str, runs: Path, k: int) -> NamedAttempts:
    return NamedAttempts(*read_finished(text, runs), k)


def _name(
    wish: ModelEvaluation,
    tasks: Sequence[ReadTask],
    attempts: Sequence[EvaluatedAttempt] = (),
    failed: str = "",
) -> NamedAttempts:
    digests = {read.task.key: read.digest for read in tasks}
    return NamedAttempts(str(wish.folder), attempts, digests, wish.attempts, failed)


def _evaluate_or_explain(
    wish: ModelEvaluation, tasks: Sequence[ReadTask], runs: Path, console: Terminal
) -> tuple[int, NamedAttempts]:
    """Do as `_evaluate`; an evaluation that cannot be made or ended is shown as failed."""
    try:
        return _evaluate(wish, tasks, runs, console)
    except (CommandError, ConfigError, DataError) as error:
        console.print(f"error: {wish.folder}: {error}")
        return FAILED, _name(wish, tasks, failed=str(error))


def _evaluate(
    wish: ModelEvaluation, tasks: Sequence[ReadTask], runs: Path, console: Terminal
) -> tuple[int, NamedAttempts]:
    """Make the attempts that are missing; return the exit code and all there are."""
    chosen = wish.model.model
    finding = nullcontext(chosen) if is_url(chosen) else find_model(chosen, runs)
    with finding as served:
        code = run_until_interrupted(_play(wish, served, tasks, console))
    begun = (wish.folder / MANIFEST).exists()
    found = read_results(wish.folder)[1] if begun else []
    graded = sum(each.reward is not None for each in found)
    if missing := len(tasks) * wish.attempts - graded:
        console.print(f"attempts without a grade: {missing}; the same command makes them once more")
    return code or (FAILED if missing else OK), _name(wish, tasks, found)


def _read_tasks(wish: ModelEvaluation) -> list[ReadTask]:
    """Return the tasks of a file, of the part `eval` of a prepared folder, or of the spec's
    held-out set. Raises ConfigError, DataError, TaskFileError and CommandError."""
    spec = load_spec(wish.spec, wish.overrides)
    path = wish.tasks or _held_out_file(wish, spec)
    parts = read_parts(path)
    tasks = parts.get(PARTS[1] if path.is_dir() else "")
    if not tasks:
        raise CommandError(f"{path} holds no task to evaluate on")
    return tasks


def _held_out_file(wish: ModelEvaluation, spec: Mapping[str, Any]) -> Path:
    for each in spec.get("learner", {}).get("eval", {}).get("sets", ()):
        if each.get("name") == MAIN_SET:
            return Path(each["tasks"])
    raise CommandError(f"{wish.spec} has no set {MAIN_SET!r} to evaluate on: pass --tasks FILE")


async def _play(
    wish: ModelEvaluation, served: str, tasks: Sequence[ReadTask], console: Terminal
) -> None:
    """Make the attempts that have no grade yet, and write each as it ends."""
    model = replace(wish.model, model=served)
    section = gateway_section(wish.spec, wish.overrides)
    async with AsyncExitStack() as stack:
        endpoint, identity = None, ""
        if is_url(served):
            endpoint = await stack.enter_async_context(open_model(model, console))
            identity = f"{endpoint.model} at {redact(served)}"
        settings = _make_settings(wish, section, tasks, identity or identify_model(served))
        results = stack.enter_context(open_results(wish.folder, settings))
        if not (open_places := results.open_places(settings)):
            return
        # A model is loaded only if there is something to play.
        endpoint = endpoint or await stack.enter_async_context(open_model(model, console))
        console.print("starting a gateway", style="dim")
        stub = await stack.enter_async_context(open_gateway(wish.spec, wish.overrides))
        console.print(f"{endpoint.model} plays {len(open_places)} attempts at {len(tasks)} tasks")
        fields = {read.task.key: read.fields for read in tasks}
        places = [PlayPlace(fields[key], number) for key, number in open_places]
        player = GatewayPlayer(stub, section, "eval")
        players = Players(endpoint, player, wish.max_turns, wish.concurrency)
        await players.play(places, _make_writer(results, console))


def _make_settings(
    wish: ModelEvaluation, section: Mapping[str, Any], tasks: Sequence[ReadTask], model: str
) -> EvaluationSettings:
    return EvaluationSettings(
        model=model,
        spec=sha256(canonical_json(section).encode()).hexdigest(),
        tasks={read.task.key: read.digest for read in tasks},
        attempts=wish.attempts,
        temperature=wish.model.temperature,
        max_turns=wish.max_turns,
    )


def _make_writer(
    results: ResultsFolder, console: Terminal
) -> Callable[[PlayPlace, ModelAttempt], None]:
    """Return what writes and prints each attempt; it raises CommandError once the endpoint fails
    again and again, since an outage must not open the environments of all tasks."""
    failures = 0

    def take(place: PlayPlace, ended: ModelAttempt) -> None:
        nonlocal failures
        attempt = RecordedAttempt(
            task_key=place.name,
            env_key=env_key_of(place.task),
            attempt=place.number,
            **asdict(ended),
        )
        results.add(attempt)
        console.print(describe_attempt(place, ended))
        failures = failures + 1 if ended.no_grade.startswith(ENDPOINT_FAILED) else 0
        if failures >= _MOST_FAILURES:
            raise CommandError(
                f"{failures} attempts in succession failed, the last by {ended.no_grade}; once that"
                " is fixed, the same command goes on"
            )

    return take
