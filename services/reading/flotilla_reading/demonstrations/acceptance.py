"""Choice of the episodes to imitate, by their rewards. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.pass_rates import PASS_REWARD


@dataclass(frozen=True, slots=True)
class AcceptanceRules:
    """Episodes are accepted from `min_reward` on; with `best_of`, only the best of each so many
    graded attempts at a task, in the order of the run (rejection sampling)."""

    min_reward: float = PASS_REWARD
    best_of: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode of a run, without its tokens; `kept` is False if they are known to be pruned.

    `step` is the one that counted it, if any."""

    key: AttemptKey
    task_key: str
    reward: float | None
    step: int | None
    evaluated: bool
    kept: bool


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted episodes, in the order of the run, and the number of all by fate: `evaluated`
    (never imitated: it would be training on held-out tasks), `ungraded`, `not_best`,
    `below_min_reward` and `accepted` add up to `episodes`."""

    accepted: tuple[Candidate, ...]
    counts: Counter[str]


def accept_episodes(episodes: Iterable[Candidate], rules: AcceptanceRules) -> Acceptance:
    """Judge the episodes of a run, given in its order."""
    counts: Counter[str] = Counter()
    graded: list[Candidate] = []
    for episode in episodes:
        counts["episodes"] += 1
        if episode.evaluated or episode.reward is None:
            counts["evaluated" if episode.evaluated else "ungraded"] += 1
        else:
            graded.append(episode)
    best = graded if rules.best_of is None else _find_best(graded, rules.best_of)
    counts["not_best"] = len(graded) - len(best)
    accepted = tuple(each for each in best if (each.reward or 0.0) >= rules.min_reward)
    counts["below_min_reward"] = len(best) - len(accepted)
    counts["accepted"] = len(accepted)
    return Acceptance(accepted, counts)


def _find_best(graded: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best of each `count` attempts at a task, in order. Of equals it is the first whose
    tokens are kept."""
    tasks: dict[str, list[int]] = {}
    for place, episode in enumerate(graded):
        tasks.setdefault(episode.task_key, []).append(place)
    chosen = (
        min(places[start : start + count], key=lambda place: _rank(graded[place], place))
        for places in tasks.values()
        for start in range(0, len(places), count)
    )
    return [graded[place] for place in sorted(chosen)]


def _rank(episode: Candidate, place: int) -> tuple[float, bool, int]:
    return -(episode.reward or 0.0), not episode.kept, place
