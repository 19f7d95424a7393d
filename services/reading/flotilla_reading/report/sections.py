"""What a report shows of its runs, next to each other. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flotilla_common.domain.eval_groups import MAIN_SET
from flotilla_common.spec.spec_values import (
    ABSENT,
    compare_specs,
    find_value,
    format_value,
    planned_steps,
)
from flotilla_common.text.parsing import as_object
from flotilla_reading.analysis.sections import Cell, Section, make_sections
from flotilla_reading.report.reproduction import list_commands, spec_to_run
from flotilla_reading.report.run_facts import ReportedEval, ReportedRun, Rewards
from flotilla_reading.statistics.paired import compare_paired

_NONE = "-"
Runs = Sequence[ReportedRun]


def build_sections(runs: Runs, curves: Section, libraries: Mapping[str, str]) -> list[Section]:
    """Return the sections of a page about one run, or several. `libraries` are the versions that
    are installed where the page is written."""
    lacking = tuple((run.run_id, each) for run in runs for each in run.problems)
    comparison = _compare_evaluations(runs)
    found = [
        Section("What is missing", "", ("run", "problem"), lacking),
        *_list_evaluations(runs),
        *([comparison] if comparison.rows else []),
        *([_list_differences(runs)] if len(runs) > 1 else []),
        curves,
        _side_by_side("Course", "", list(map(_describe_course, runs)), runs),
        _list_alarms(runs),
        *(section for run in runs for section in _show_analysis(run)),
        _side_by_side("Data", "", list(map(_describe_data, runs)), runs),
        _list_versions(runs, libraries),
        *(section for run in runs for section in _show_reproduction(run)),
    ]
    return found if lacking else found[1:]


def build_card_sections(run: ReportedRun, libraries: Mapping[str, str]) -> list[Section]:
    """Return what a page about one run's model tells of it: its evaluations, its data, what it is
    made with, and how to make it again."""
    runs = [run]
    comparison = _compare_evaluations(runs)
    return [
        *_list_evaluations(runs),
        *([comparison] if comparison.rows else []),
        _side_by_side("Data", "", [_describe_data(run)], runs),
        _list_versions(runs, libraries),
        *_show_reproduction(run),
    ]


def _side_by_side(
    title: str, text: str, columns: Sequence[Mapping[str, str]], runs: Runs
) -> Section:
    return _join_columns(title, text, (title.lower(), *(run.run_id for run in runs)), columns)


def _join_columns(
    title: str, text: str, headings: tuple[str, ...], columns: Sequence[Mapping[str, str]]
) -> Section:
    """Return a table with a row for each name that any column has."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = tuple((name, *(column.get(name, _NONE) for column in columns)) for name in names)
    return Section(title, text, headings, rows)


def _list_evaluations(runs: Runs) -> Iterator[Section]:
    """Yield a table for each evaluation set: of each run the first and the newest evaluation, and
    that of what a warm start ended with."""
    sets = dict.fromkeys(name for run in runs for each in run.evals for name in each.results)
    if not sets:
        yield Section("Evaluations", "No evaluation has ended.")
    for name in sets:
        headings, columns = ["mean over tasks"], list[dict[str, str]]()
        for run in runs:
            own = [each for each in run.evals if name in each.results]
            warm = find_value(run.spec, "learner.warm_start.steps")
            for each in own[:1] + [e for e in own[1:-1] if e.step == warm] + own[1:][-1:]:
                headings.append(f"{run.run_id}, step {each.step}")
                columns.append(_format_eval(each, name))
        text = (
            "With 95 % intervals, clustered by task. Tasks without a grade are counted below, and"
            " are in no mean."
        )
        yield _join_columns(f"Evaluations on {name}", text, tuple(headings), columns)


def _format_eval(each: ReportedEval, name: str) -> dict[str, str]:
    result = as_object(each.results[name])
    by_env = as_object(result.get("by_env"))
    cells = {
        f"{env}, {label}": text
        for env, figures in {"all": result, **by_env}.items()
        for label, text in _format_figures(as_object(figures)).items()
    }
    counts = {
        "tasks with a grade": result.get("tasks"),
        "tasks without a grade": result.get("missing"),
        "tasks with fewer grades than attempts": result.get("incomplete"),
    }
    return {**cells, **{label: str(count) for label, count in counts.items() if count is not None}}


def _format_figures(figures: Mapping[str, Any]) -> dict[str, str]:
    """Format each figure that has an interval."""
    found: dict[str, str] = {}
    for name, value in figures.items():
        low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
        if low is not None and high is not None:
            form = ".1%" if name.startswith("pass") else ".3f"
            label = name.replace("pass_at_", "pass@")
            found[label] = f"{value:{form}} [{low:{form}}, {high:{form}}]"
    return found


def _compare_evaluations(runs: Runs) -> Section:
    text = (
        f"Mean reward of a task on {MAIN_SET}, minus that in the other evaluation, over the tasks"
        " that both have graded attempts at; p is of a two-sided exact test of no difference. Tasks"
        " needed: with so many such tasks this difference is found four times in five."
    )
    headings = ("newest evaluation", "tasks", "difference", "won", "lost", "tied", "p")
    rows = tuple((name, *_format_comparison(one, other)) for name, one, other in _pairs(runs))
    return Section("Task by task", text, (*headings, "tasks needed"), rows)


def _pairs(runs: Runs) -> Iterator[tuple[str, Rewards, Rewards]]:
    """Yield each run's newest evaluation against its first, and against that of the first run."""
    for run in runs:
        if len(run.rewards) > 1:
            (first, before), (newest, after) = run.rewards.items()
            yield f"{run.run_id}: step {newest} against step {first}", before, after
    newest_of = [list(run.rewards.values())[-1] if run.rewards else {} for run in runs]
    for run, rewards in list(zip(runs, newest_of, strict=True))[1:]:
        yield f"{run.run_id} against {runs[0].run_id}", newest_of[0], rewards


def _format_comparison(one: Rewards, other: Rewards) -> tuple[str, ...]:
    try:
        found = compare_paired(one, other)
    except ValueError as error:
        return ("0", str(error), *[_NONE] * 5)
    needed = found.tasks_to_show(found.difference)
    return (
        f"{found.tasks:,}",
        f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]",
        *(str(count) for count in (found.won, found.lost, found.tied)),
        f"{found.p:.4f}",
        _NONE if needed is None else f"{needed:,}",
    )


def _list_differences(runs: Runs) -> Section:
    differing = compare_specs([run.spec for run in runs])
    rows = tuple((key, *map(format_value, values)) for key, values in differing.items())
    text = "Keys by which the specs differ." if rows else "The specs are equal."
    return Section("What differs", text, ("key", *(run.run_id for run in runs)), rows)


def _count_warm_steps(spec: Mapping[str, Any]) -> str:
    """Return the steps of the run's warm start; empty without one."""
    found = find_value(spec, "learner.warm_start.steps")
    return "" if found is ABSENT else f"the first {found}"


def _describe_course(run: ReportedRun) -> dict[str, str]:
    newest = run.metrics.newest()
    seconds, fates = (_numbers(run.summary.get(name)) for name in ("seconds", "trajectories"))
    kinds = ("sft/loss", "reward/avg_raw_reward")
    done = max((step for name in kinds for step in run.metrics.series(name)[0]), default=0)
    planned = planned_steps(run.spec)
    figures = {
        "optimizer steps": f"{done} of {'the default' if planned is None else planned}",
        "of which imitate": _count_warm_steps(run.spec),
        "starts of the learner": str(run.starts),
        "attempts": ", ".join(f"{count:,} {fate}" for fate, count in fates.items()),
        "seconds": ", ".join(f"{k.replace('_', ' ')} {v:,.0f}" for k, v in seconds.items()),
        **{
            f"policy tokens {fate}": f"{sum(run.metrics.curve(f'cost/{fate}_tokens')[1]):,.0f}"
            for fate in ("sampled", "trained", "dropped")
        },
        "cost of machines": f"${newest['cost/accrued']:,.2f}" if "cost/accrued" in newest else "",
    }
    return {**run.about, **{name: text for name, text in figures.items() if text}}


def _numbers(found: Any) -> dict[str, float]:
    return {name: n for name, n in as_object(found).items() if isinstance(n, int | float)}


def _list_alarms(runs: Runs) -> Section:
    rows = tuple(
        (
            *(run.run_id, str(each.get("step")), str(each.get("state"))),
            f"{each.get('alarm')} of {each.get('scope')}",
            f"{each.get('cause')}. {each.get('fix')}",
        )
        for run in runs
        for each in run.alarms
    )
    headings = ("run", "step", "state", "alarm", "cause, and what to try")
    return Section("Alarms", "" if rows else "None was raised.", headings, rows)


def _show_analysis(run: ReportedRun) -> list[Section]:
    """Return the sections of its newest analysis. Their links lead into the inspector, which a page
    elsewhere has not: here they are texts."""
    if not run.analysis:
        return []
    step = run.analysis.get("step")
    try:
        sections = make_sections(run.analysis)
    except (KeyError, TypeError, ValueError) as error:
        text = f"It cannot be shown ({error!r}): `flotilla analyze` writes it again."
        return [Section(f"Analysis of {run.run_id}, step {step}", text)]
    return [
        replace(
            section,
            title=f"{section.title}: {run.run_id}, step {step}",
            rows=tuple(tuple(map(_unlink, row)) for row in section.rows),
        )
        for section in sections
    ]


def _unlink(cell: Cell) -> str:
    return cell if isinstance(cell, str) else ", ".join(link.text for link in cell)


def _describe_data(run: ReportedRun) -> dict[str, str]:
    source, counts = (as_object(run.manifest.get(name)) for name in ("source", "counts"))
    dropped = as_object(counts.get("dropped"))
    named = {
        "training tasks from": find_value(run.spec, "learner.tasks"),
        "manifest": find_value(run.spec, "learner.data"),
        **{f"source: {name}": value for name, value in source.items()},
        **{f"tasks: {name}": counts.get(name) for name in ("source", "train", "eval")},
        **{f"tasks left out: {reason}": count for reason, count in dropped.items()},
    }
    sets = find_value(run.spec, "learner.eval.sets")
    for each in map(as_object, sets if isinstance(sets, list) else []):
        named[f"evaluation set {each.get('name')} from"] = each.get("tasks")
    return {name: str(value) for name, value in named.items() if isinstance(value, str | int)}


def _list_versions(runs: Runs, libraries: Mapping[str, str]) -> Section:
    columns = [
        {
            "Flotilla": "; ".join(
                f"{each.get('version')}, commit {each.get('commit')}"
                for each in run.writers or [as_object(run.spec.get("written_by"))]
            ),
            "model": str(policy.get("model", _NONE)),
            "its revision": str(policy.get("revision", _NONE)),
        }
        for run in runs
        for policy in [as_object(run.spec.get("policy"))]
    ]
    installed = ", ".join(f"{name} {version}" for name, version in libraries.items())
    text = (
        "The files in requirements of that commit pin every package. Where this page was written,"
        f" there are {installed}."
    )
    return _side_by_side("Versions", text, columns, runs)


def _show_reproduction(run: ReportedRun) -> Iterator[Section]:
    yield Section(f"To reproduce {run.run_id}", listing="\n".join(list_commands(run)))
    spec = json.dumps(spec_to_run(run.spec), indent=2, ensure_ascii=False)
    yield Section(f"Spec of {run.run_id}", listing=spec)
