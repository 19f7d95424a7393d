"""`flotilla data check`: plays tasks on their real environments to find out which can be trained
on."""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.aio.concurrency import raise_failure, running_tasks
from flotilla_common.domain.even_spread import spread_evenly
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.tasks.task_checks import CheckFileError, Outcome, TaskCheck
from flotilla_common.tasks.task_digests import task_digest
from flotilla_common.tasks.task_files import ReadTask
from flotilla_common.text.printable_text import one_line
from flotilla_launcher.cli.adapters.gateway_player import GatewayPlayer
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway, paid_backend
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    FAILED,
    OK,
    report_error,
    reports_errors,
    run_interruptible,
)
from flotilla_launcher.cli.data_views import reports_data_errors
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.terminal import Terminal, make_table, print_table
from flotilla_reading.data.check.results_file import ResultsFile, open_results
from flotilla_reading.data.check.task_check import check_task, count_episodes, solution_digest
from flotilla_reading.data.check.verdicts import CHECKER, CHECKS, judge_task
from flotilla_reading.data.dataset_folder import read_parts
from flotilla_reading.data.entries import DataError
from flotilla_reading.play.ports import EpisodePlayer
from flotilla_reading.play.solutions import Solution, read_solutions

_DETAIL_CHARS = 300
_VERDICTS = (Outcome.VALID, Outcome.INVALID, Outcome.ERROR, Outcome.TIMEOUT)
# Fleet's backend with which each grade takes an episode of its own.
_GRADES_ONCE = "fleet_openenv"


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is checked, where the results go, and how much is done concurrently."""

    spec: Path
    tasks: Path
    solutions: Path | None
    out: Path
    key: str | None
    envs: Sequence[str]
    limit: int | None
    concurrency: int
    again: bool
    yes: bool


@dataclass(frozen=True, slots=True)
class _Job:
    """A task to check, with its JSON, its solution, and the digests of both."""

    read: ReadTask
    fields: Mapping[str, Any]
    digest: str
    solution: Solution | None
    solved_by: str

    @property
    def key(self) -> str:
        return self.read.task.key

    @property
    def env_key(self) -> str:
        return self.read.task.env_key


@reports_errors(bad_spec=BAD_SPEC)
@reports_data_errors
def check_data(options: CheckOptions, overrides: Sequence[str]) -> int:
    """Check the tasks that have no result yet; print those that are not valid, and a table."""
    console = Terminal(soft_wrap=True)
    jobs = _choose_jobs(options)
    section = gateway_section(options.spec, overrides)
    try:
        with open_results(options.out) as results:
            known = [] if options.again else _find_known(results, jobs)
            if known:
                console.print(f"{len(known)} results are in {options.out} already")
            for each in known:
                _report(each, console)
            keys = {each.key for each in known}
            left = [job for job in jobs if job.key not in keys]
            _ask_for_cost(left, section, options, console)
            try:
                if left:
                    _run_checks(left, section, options, overrides, results, console)
            finally:
                _print_report(results, jobs, console)
    except (CheckFileError, OSError) as error:
        return report_error(f"--out: {error}", BAD_SPEC)
    verdicts = {results.known[job.key].verdict for job in jobs}
    return OK if verdicts == {Outcome.VALID} else FAILED


def _choose_jobs(options: CheckOptions) -> list[_Job]:
    """Raises DataError and TaskFileError."""
    solutions = read_solutions(options.solutions) if options.solutions else {}
    reads = [read for part in read_parts(options.tasks).values() for read in part]
    unknown = solutions.keys() - {read.task.key for read in reads}
    if solutions and len(unknown) == len(solutions):
        raise DataError(
            f"{options.solutions} solves none of the tasks of {options.tasks}, but for instance"
            f" {min(unknown)!r}; name the solutions of these tasks"
        )
    known = sorted({read.task.env_key for read in reads})
    for env in options.envs:
        if env not in known:
            raise DataError(f"--env: {options.tasks} has no {env!r}, but {', '.join(known)}")
    chosen = [read for read in reads if not options.envs or read.task.env_key in options.envs]
    if options.key is not None:
        chosen = [read for read in chosen if read.task.key == options.key]
    if not chosen:
        raise DataError(f"{options.tasks}: none of its {len(reads)} tasks is chosen by --key")
    jobs = [_make_job(read, solutions.get(read.task.key)) for read in chosen]
    return spread_evenly(
        jobs, options.limit, group_of=lambda job: job.env_key, key_of=lambda job: job.key
    )


def _make_job(read: ReadTask, solution: Solution | None) -> _Job:
    fields = read.fields
    return _Job(read, fields, task_digest(read.task, fields), solution, solution_digest(solution))


def _find_known(results: ResultsFile, jobs: Sequence[_Job]) -> list[TaskCheck]:
    found = (results.find(job.key, job.digest, job.solved_by) for job in jobs)
    return [each for each in found if each is not None]


def _ask_for_cost(
    jobs: Sequence[_Job], section: Mapping[str, Any], options: CheckOptions, console: Terminal
) -> None:
    """Say how many episodes of paid environments the checks open, and ask whether they may. Raises
    DataError if they may not."""
    episodes: Counter[str] = Counter()
    for job in jobs:
        if backend := paid_backend(section, job.env_key):
            regrades = backend != _GRADES_ONCE
            episodes[job.env_key] += count_episodes(job.read.task, job.solution, regrades=regrades)
    if not episodes:
        return
    each = ", ".join(f"{count} of {env}" for env, count in sorted(episodes.items()))
    count = episodes.total()
    console.print(f"at most {count} episodes will be opened at Fleet, which charges: {each}")
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise DataError("these episodes cost money: confirm with --yes, or choose fewer by --limit")
    console.print("Open them? y or n")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise DataError("nothing was checked")


def _run_checks(
    jobs: Sequence[_Job],
    section: Mapping[str, Any],
    options: CheckOptions,
    overrides: Sequence[str],
    results: ResultsFile,
    console: Terminal,
) -> None:
    """Raises InterruptedByUserError."""

    async def check(interrupts: Interrupts) -> int:
        async with open_gateway(options.spec, overrides) as stub:
            player = GatewayPlayer(stub, section, "data-check")
            work = _check_all(player, jobs, options.concurrency, results, console)
            await interrupts.unless_interrupted(work)
        return OK

    run_interruptible(check)


async def _check_all(
    player: EpisodePlayer,
    jobs: Sequence[_Job],
    concurrency: int,
    results: ResultsFile,
    console: Terminal,
) -> None:
    waiting, ended = iter(jobs), 0
    with console.status(f"0 of {len(jobs)} tasks are checked") as status:

        async def check_waiting() -> None:
            nonlocal ended
            for job in waiting:
                found = await _check_job(player, job)
                await asyncio.to_thread(results.add, found)
                ended += 1
                status.update(f"{ended} of {len(jobs)} tasks are checked")
                _report(found, console)

        workers = min(concurrency, len(jobs))
        async with running_tasks(*(check_waiting() for _ in range(workers))) as running:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            raise_failure(running)


async def _check_job(player: EpisodePlayer, job: _Job) -> TaskCheck:
    began = loop_time()
    checks = await check_task(player, job.read.task, job.fields, job.solution)
    return TaskCheck(
        *(job.key, job.env_key, job.digest, job.solved_by, CHECKER),
        judge_task(checks),
        checks,
        round(loop_time() - began, 3),
    )


def _report(found: TaskCheck, console: Terminal) -> None:
    """Print a line about a task that is not valid: the checks that say so, and why."""
    if found.verdict is Outcome.VALID:
        return
    causes: dict[str, list[str]] = {}
    for name, result in found.checks.items():
        if result.outcome is found.verdict:
            printed = f" ({result.printed})" if result.printed else ""
            causes.setdefault(f"{result.detail}{printed}", []).append(name)
    details = "; ".join(f"{', '.join(names)}: {detail}" for detail, names in causes.items())
    console.print(one_line(f"{found.key}: {found.verdict}: {details}", _DETAIL_CHARS))


def _print_report(results: ResultsFile, jobs: Sequence[_Job], console: Terminal) -> None:
    """Print for each environment how many tasks have which verdict, and the checks that found
    invalid ones; then which checks were not made."""
    found = [results.known[job.key] for job in jobs if _has_result(results, job)]
    table = make_table(("environment", "tasks", *_VERDICTS, *CHECKS), no_wrap=True)
    envs = sorted({each.env_key for each in found})
    for env in envs:
        _add_row(table, env, [each for each in found if each.env_key == env])
    if len(envs) > 1:
        _add_row(table, "total", found)
    print_table(table, console)
    skipped: Counter[tuple[str, str]] = Counter()
    for each in found:
        for name, result in each.checks.items():
            if result.outcome is Outcome.UNCHECKED:
                skipped[name, result.detail] += 1
    for (name, detail), count in sorted(skipped.items()):
        console.print(f"{name} is unchecked for {count} tasks: {detail}")
    if len(found) < len(jobs):
        console.print(f"{len(jobs) - len(found)} tasks are left: run the command again")
    console.print(f"Results are in {results.path}")


def _has_result(results: ResultsFile, job: _Job) -> bool:
    """Return True if the task as it is now has a result, however uncertain."""
    known = results.known.get(job.key)
    return known is not None and (known.digest, known.solution) == (job.digest, job.solved_by)


def _add_row(table: Any, name: str, found: Sequence[TaskCheck]) -> None:
    verdicts = Counter(each.verdict for each in found)
    failed = Counter(
        check
        for each in found
        for check, result in each.checks.items()
        if result.outcome is Outcome.INVALID
    )
    counts = [len(found), *(verdicts[v] for v in _VERDICTS), *(failed[c] for c in CHECKS)]
    table.add_row(name, *map(str, counts))
