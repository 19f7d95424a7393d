"""One task: over the steps of a run, and two attempts at it side by side."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from flotilla_common.domain.attempts import AttemptKey
from flotilla_reading.inspector.pages.charts import Points, draw_chart
from flotilla_reading.inspector.pages.links import Links, attempt_id
from flotilla_reading.inspector.pages.messages import ShownMessage, attempt_facts, shown_messages
from flotilla_reading.inspector.pages.page import Crumb, Page
from flotilla_reading.inspector.queries.episodes import Episode
from flotilla_reading.inspector.queries.group_rows import GroupRow, TryRow
from flotilla_reading.inspector.queries.run_folders import read_journal
from flotilla_reading.inspector.queries.run_library import RunLibrary
from flotilla_reading.inspector.queries.step_pages import list_evals
from flotilla_reading.inspector.queries.task_groups import TaskGroups, read_task

ReadEpisode = Callable[[str, AttemptKey], Episode]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two attempts side by side: what may be chosen of its run, and the chosen one."""

    run: str
    groups: tuple[GroupRow, ...]
    episode: Episode | None
    messages: Sequence[ShownMessage]
    facts: Sequence[tuple[str, str]]


def task_page(
    library: RunLibrary, links: Links, run_id: str, task_key: str, before: int | None
) -> Page:
    """Show the groups of a task over the run. Raises NotFoundError."""
    found, versions = _read_groups(library, run_id, task_key, before)
    window = found.looked_at
    values = {
        "run": run_id,
        "task_key": task_key,
        "found": found,
        "chart": draw_chart(_pass_rates(found.groups, versions)),
        "older": links.task(run_id, task_key, window.before) if window.before else "",
        "crumbs": (Crumb(run_id, links.run(run_id)),),
    }
    return Page("task.html", f"Task {task_key}", values)


def compare_page(
    library: RunLibrary,
    links: Links,
    read: ReadEpisode,
    task_key: str,
    places: Sequence[tuple[str, str]],
) -> Page:
    """Show two attempts at a task side by side. `places` are run and attempt (see `attempt_id`);
    an attempt that the run does not have becomes its newest. Raises NotFoundError."""
    sides: list[Side] = []
    for run_id, attempt in places:
        found, _ = _read_groups(library, run_id, task_key, also=attempt.rsplit("/", 2)[0])
        taken = [attempt_id(s.episode.row) for s in sides if s.episode and s.run == run_id]
        row = _choose(found.groups, attempt, taken)
        episode = read(run_id, row.key) if row else None
        messages = shown_messages(links, run_id, episode) if episode else ()
        facts = attempt_facts(episode) if episode else ()
        sides.append(Side(run_id, found.groups, episode, messages, facts))
    prompts = [side.groups[0].prompt for side in sides if side.groups]
    values = {
        "task_key": task_key,
        "prompt": next(iter(prompts), ""),
        "sides": sides,
        "runs": [card.run_id for card in library.cards()],
        "crumbs": (Crumb(places[0][0], links.run(places[0][0])),),
    }
    return Page("compare.html", f"Task {task_key} side by side", values)


def _read_groups(
    library: RunLibrary, run_id: str, task_key: str, before: int | None = None, also: str = ""
) -> tuple[TaskGroups, dict[str, int]]:
    """Read groups of a task, and the policy versions of evaluations."""
    with read_journal(library.open(run_id).folder) as db:
        versions = {card.eval_id: card.version for card in list_evals(db)}
        return read_task(db, task_key, before, also), versions


def _pass_rates(groups: Sequence[GroupRow], versions: Mapping[str, int]) -> dict[str, Points]:
    found: dict[str, list[tuple[float, float]]] = {"evaluations": [], "training": []}
    for group in groups:
        step = versions.get(group.eval_id) if group.eval_id else group.step
        if group.rewards and not group.judged and step is not None:
            rate = group.passes / len(group.rewards)
            found["evaluations" if group.eval_id else "training"].append((step, rate))
    return {f"pass rate in {kind}": sorted(points) for kind, points in found.items()}


def _choose(groups: Sequence[GroupRow], attempt: str, taken: Container[str]) -> TryRow | None:
    """Return an attempt; without it, the first one that is not taken."""
    rows = {attempt_id(row): row for group in groups for row in group.tries}
    return rows.get(attempt) or next((rows[name] for name in rows if name not in taken), None)
