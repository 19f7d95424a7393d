"""Content of each page: the values for its template."""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.domain.attempts import AttemptKey
from services.common.episodes.episode_text import EpisodeMessage
from services.reading.analysis.analysis_files import analysis_page
from services.reading.inspector.pages.links import Links
from services.reading.inspector.pages.token_data import MOST_TOKENS, token_data
from services.reading.inspector.pages.visible_text import cut
from services.reading.inspector.queries.episodes import Episode
from services.reading.inspector.queries.live_board import read_live_board
from services.reading.inspector.queries.run_folders import (
    NotFoundError,
    describe_run,
    read_journal,
)
from services.reading.inspector.queries.run_library import RunLibrary
from services.reading.inspector.queries.step_pages import (
    STEPS_PER_PAGE,
    list_evals,
    list_steps,
    read_eval,
    read_step,
)
from services.reading.inspector.queries.token_tracks import TokenTrack

DEFAULT_METRIC = "reward/avg_raw_reward"
# Metrics of a step, in the list of steps and on its page.
STEP_METRICS = (
    ("reward/avg_raw_reward", "reward"),
    ("reward/avg_pass_at_1", "pass@1"),
    ("reward/variance_per_prompt", "variance"),
    ("policy/entropy", "entropy"),
    ("mismatch/kl_train_infer", "KL engine/trainer"),
    ("policy/grad_norm", "gradient norm"),
)
ROWS_PER_TABLE = 500
MOST_RUNS, _MOST_POINTS, _MOST_TABLE_ROWS = 8, 4_000, 300
_IMAGES = {
    "image/png": b"\x89PNG\r\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A page to render: a template and its values."""

    template: str
    title: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Crumb:
    """One part of the path to a page."""

    text: str
    href: str


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message of the conversation; `content` is cut by `left_out` characters."""

    message: EpisodeMessage
    content: str
    left_out: int
    raw: str
    # Facts about the policy's turn, as (label, value).
    facts: tuple[tuple[str, str], ...]
    turn: int | None
    images: tuple[str, ...]
    # Answers that were cut for the policy: (bytes, address; "" if not kept).
    answers: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values of a metric, thinned to the resolution of a screen."""

    run: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class PageBook:
    """All pages of the runs in a library, linked by `links`."""

    def __init__(self, library: RunLibrary, links: Links, *, inline: bool = False) -> None:
        """Create it; `inline` puts data into the pages, for use without a server."""
        self._library = library
        self._links = links
        self._inline = inline

    def home(self) -> Page:
        """List the runs."""
        return Page("runs.html", "Runs", {"runs": self._library.cards(), "crumbs": ()})

    def run(self, run_id: str) -> Page:
        """Show a run: numbers, groups in flight, steps and evaluations."""
        run = self._library.open(run_id)
        with read_journal(run.folder) as db:
            steps, evals = list_steps(db)[:12], list_evals(db)
        values = {
            "card": describe_run(run.folder),
            "steps": steps,
            "step_metrics": STEP_METRICS,
            "metrics": self._step_metrics(run_id, [each.step for each in steps]),
            "evals": evals,
            "board": read_live_board(run.folder),
            "newest": run.metrics.newest(),
            "analyzed": analysis_page(run.folder).exists(),
            "crumbs": (),
        }
        return Page("run.html", run_id, {"run": run_id, **values})

    def analysis(self, run_id: str) -> bytes:
        """Return the page of a run's newest analysis, which is complete. Raises NotFoundError."""
        path = analysis_page(self._library.open(run_id).folder)
        try:
            return path.read_bytes()
        except OSError:
            raise NotFoundError(f"Run {run_id!r} has no analysis yet.") from None

    def live(self, run_id: str) -> Page:
        """Show the groups in flight, as a part of the run's page."""
        run = self._library.open(run_id)
        return Page("live.html", run_id, {"run": run_id, "board": read_live_board(run.folder)})

    def steps(self, run_id: str, before: int | None) -> Page:
        """List a page of steps."""
        run = self._library.open(run_id)
        with read_journal(run.folder) as db:
            steps = list_steps(db, before=before)
        more = len(steps) == STEPS_PER_PAGE
        values = {
            "steps": steps,
            "step_metrics": STEP_METRICS,
            "metrics": self._step_metrics(run_id, [each.step for each in steps]),
            "older": self._links.steps(run_id, steps[-1].step) if more else "",
        }
        return Page("steps.html", f"Steps of {run_id}", self._below(run_id, values))

    def step(self, run_id: str, step: int, page: int = 1) -> Page:
        """Show the groups of a step. Raises NotFoundError."""
        run = self._library.open(run_id)
        with read_journal(run.folder) as db:
            found = read_step(db, step, page)
        metrics = self._step_metrics(run_id, [step])[step]
        numbers = [(label, metrics[name]) for name, label in STEP_METRICS if name in metrics]
        values = {"found": found, "groups": found.trained, "numbers": numbers}
        return Page("step.html", f"Step {step}", self._below(run_id, values))

    def eval(self, run_id: str, eval_id: str, page: int = 1) -> Page:
        """Show an evaluation. Raises NotFoundError."""
        run = self._library.open(run_id)
        with read_journal(run.folder) as db:
            found = read_eval(db, eval_id, page)
        values = {"found": found, "groups": found.groups}
        return Page("eval.html", f"Evaluation {eval_id}", self._below(run_id, values))

    def episode(self, run_id: str, key: AttemptKey) -> Episode:
        """Read an attempt, and have the journal keep it while it is shown."""
        run = self._library.open(run_id)
        if not self._inline:
            run.holds.hold(key.group_id)
        return run.shelf.read(key)

    def conversation(self, run_id: str, episode: Episode) -> Page:
        """Show the conversation."""
        values = {"messages": self._messages(run_id, episode), "view": "conversation"}
        return self._attempt("attempt.html", run_id, episode, values)

    def tokens(self, run_id: str, episode: Episode, sequence: int = 0) -> Page:
        """Show the tokens as coloured text. Raises NotFoundError."""
        track = track_of(episode, sequence) if episode.tracks else None
        values = {
            "view": "tokens",
            "sequence": sequence,
            "track": track,
            "data": self._inline_data(episode, sequence) if self._inline and track else "",
        }
        return self._attempt("tokens.html", run_id, episode, values)

    def _inline_data(self, episode: Episode, sequence: int) -> str:
        return embed(base64.b64encode(self.token_data(episode, sequence)).decode())

    def token_data(self, episode: Episode, sequence: int) -> bytes:
        """Return the data for the script of the coloured text. Raises NotFoundError."""
        track = track_of(episode, sequence)
        texts = episode.texts_of(sequence, 0, min(len(track), MOST_TOKENS))
        return token_data(track, texts)

    def table(self, run_id: str, episode: Episode, sequence: int, page: int) -> Page:
        """Show the tokens' numbers as a table. Raises NotFoundError."""
        track = track_of(episode, sequence) if episode.tracks else None
        pages = max(1, -(-len(track or ()) // ROWS_PER_TABLE))
        page = min(max(1, page), pages)
        start = (page - 1) * ROWS_PER_TABLE
        values = {
            "view": "table",
            "sequence": sequence,
            "track": track,
            "rows": _table_rows(episode, sequence, start) if track else (),
            "page": page,
            "pages": pages,
        }
        return self._attempt("table.html", run_id, episode, values)

    def curves(self, runs: Sequence[str], metric: str) -> Page:
        """Plot a metric of several runs together; of the newest run by default."""
        known = [card.run_id for card in self._library.cards()]
        chosen = [run for run in dict.fromkeys(runs) if run in known][:MOST_RUNS] or known[:1]
        names = sorted({n for run in chosen for n in self._library.open(run).metrics.names()})
        if metric not in names:
            metric = DEFAULT_METRIC if DEFAULT_METRIC in names else next(iter(names), "")
        curves = self.curve_data(chosen, metric)
        values = {
            "runs": known[:100],
            "chosen": chosen,
            "names": names,
            "metric": metric,
            "curves": curves,
            "rows": _curve_rows(curves),
            "data": embed(curves_to_json(curves)),
            "crumbs": (Crumb("Curves", ""),),
        }
        return Page("curves.html", "Curves", values)

    def curve_data(self, runs: Sequence[str], metric: str) -> list[Curve]:
        """Return the values of a metric, run by run. Raises NotFoundError."""
        return [_thin(run, *self._library.open(run).metrics.series(metric)) for run in runs]

    def _attempt(
        self, template: str, run_id: str, episode: Episode, values: dict[str, Any]
    ) -> Page:
        row, group = episode.row, episode.group
        links = self._links
        crumbs = [Crumb(run_id, links.run(run_id))]
        if group.step is not None:
            crumbs.append(Crumb(f"Step {group.step}", links.step(run_id, group.step)))
        elif group.eval_id:
            crumbs.append(Crumb(group.eval_id, links.eval(run_id, group.eval_id)))
        title = f"{row.group_id} attempt {row.index}"
        shared = {
            "run": run_id,
            "episode": episode,
            "row": row,
            "group": group,
            "trajectory": episode.trajectory,
            "facts": attempt_facts(episode),
            "unused": row.unused or group.reason,
            "crumbs": tuple(crumbs),
        }
        return Page(template, title, {**shared, **values})

    def _messages(self, run_id: str, episode: Episode) -> list[ShownMessage]:
        """List the messages of the last sequence, which is the whole conversation."""
        number = len(episode.sequences) - 1
        if number < 0:
            return []
        text, track = episode.sequences[number], episode.tracks[number]
        turns = {turn.message: turn for turn in text.turns}
        sequence = episode.trajectory.sequences[number]
        shown: list[ShownMessage] = []
        for index, message in enumerate(text.messages):
            content, left_out = cut(message.content)
            turn, run = turns.get(index), text.runs[message.run]
            media = [(n, sequence.media[n]) for n in message.media]
            images = [n for n, item in media if image_type(item.content)]
            others = [(n, item) for n, item in media if n not in images]
            raw = self._links.raw(run_id, episode.row, number, f"message-{index}")
            shown.append(
                ShownMessage(
                    message=message,
                    content=content,
                    left_out=left_out,
                    raw=raw if left_out else "",
                    facts=turn_facts(track, run.start, run.end, turn.timing) if turn else (),
                    turn=turn.number if turn else None,
                    images=tuple(self._links.media(run_id, episode.row, number, n) for n in images),
                    answers=tuple(
                        (
                            item.size_bytes,
                            self._links.raw(run_id, episode.row, number, f"answer-{n}")
                            if item.content
                            else "",
                        )
                        for n, item in others
                    ),
                )
            )
        return shown

    def _below(self, run_id: str, values: dict[str, Any]) -> dict[str, Any]:
        crumbs = (Crumb(run_id, self._links.run(run_id)),)
        return {"run": run_id, "crumbs": crumbs, **values}

    def _step_metrics(self, run_id: str, steps: Sequence[int]) -> dict[int, dict[str, float]]:
        metrics = self._library.open(run_id).metrics
        return metrics.at_step([name for name, _ in STEP_METRICS], steps)


def track_of(episode: Episode, sequence: int) -> TokenTrack:
    """Return the token track of a sequence. Raises NotFoundError."""
    if 0 <= sequence < len(episode.tracks):
        return episode.tracks[sequence]
    raise NotFoundError(
        f"The attempt has no sequence {sequence}; it has {len(episode.tracks)}, counted from 0."
    )


def raw_text(episode: Episode, sequence: int, part: str) -> str:
    """Return the whole of a text cut in a page: `message-N` or `answer-N`. Raises NotFoundError."""
    kind, _, digits = part.partition("-")
    number = int(digits) if digits.isascii() and digits.isdigit() else -1
    if kind == "answer" and number >= 0:
        return episode.media_of(sequence, number).content.decode(errors="replace")
    known = 0 <= sequence < len(episode.sequences)
    if kind == "message" and known and 0 <= number < len(episode.sequences[sequence].messages):
        return episode.sequences[sequence].messages[number].content
    raise NotFoundError(f"The attempt has no text {part!r} in sequence {sequence}.")


def image_type(content: bytes) -> str:
    """Return the type of an image by its first bytes; "" for anything else."""
    return next((mime for mime, magic in _IMAGES.items() if content.startswith(magic)), "")


def embed(value: Any) -> str:
    """Return JSON that is safe within a script element: nothing in it closes the element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def curves_to_json(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return curves for a page's script."""
    return [{"run": c.run, "steps": c.steps, "values": c.values} for c in curves]


def _thin(run: str, steps: list[int], values: list[float]) -> Curve:
    """Keep the newest value of each step; of many steps, the last and every n-th."""
    newest = dict(zip(steps, values, strict=True))
    ordered = sorted(newest)
    stride = -(-len(ordered) // _MOST_POINTS) or 1
    kept = ordered[::-1][::stride][::-1]
    return Curve(run, tuple(kept), tuple(newest[step] for step in kept))


def _curve_rows(curves: Sequence[Curve]) -> list[tuple[int, list[float | None]]]:
    by_run = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = sorted({step for each in by_run for step in each})[-_MOST_TABLE_ROWS:]
    return [(step, [each.get(step) for each in by_run]) for step in steps[::-1]]


def attempt_facts(episode: Episode) -> list[tuple[str, str]]:
    """Return labels and values of an attempt."""
    trajectory, row = episode.trajectory, episode.row
    counts, facts = trajectory.counts, trajectory.facts
    policies = dict.fromkeys(f"{p.run_epoch}:{p.version}" for p in trajectory.policies)
    errors = ", ".join(f"{n} {name}" for name, n in counts.tool_errors.items())
    listed = [
        ("stopped by", row.ended),
        ("partial reward", _number(trajectory.partial_reward)),
        ("turns", f"{counts.turns}"),
        ("tool calls", f"{counts.tool_calls}" + (f" ({errors})" if errors else "")),
        ("parse errors", f"{counts.parse_errors}" if counts.parse_errors else ""),
        ("repeats", f"{counts.repeats}" if counts.repeats else ""),
        ("tokens", f"{row.tokens:,}, {row.policy_tokens:,} by the policy"),
        ("policy", ", ".join(policies)),
        ("time", f"{row.seconds:.1f} s; open {counts.open_s:.1f} s, grade {counts.grade_s:.1f} s"),
        ("worker", facts.worker_id),
        ("instance", facts.instance_id),
        ("environment", " ".join(filter(None, (facts.env_key, facts.env_version)))),
    ]
    return [(label, value) for label, value in listed if value]


def turn_facts(track: TokenTrack, start: int, end: int, timing: Any) -> tuple[Any, ...]:
    """Return labels and values of a turn's tokens."""
    logprobs = track.logprobs[start:end]
    sampled = logprobs[~np.isnan(logprobs)]
    pairs = np.stack([track.epochs[start:end], track.versions[start:end]], axis=1)
    policies = np.unique(pairs[pairs[:, 1] >= 0], axis=0).tolist()
    listed = [("tokens", f"{end - start:,}")]
    if len(sampled):
        listed.append(("mean logprob", f"{sampled.mean():.3f}"))
    listed.append(("policy", ", ".join(f"{epoch}:{version}" for epoch, version in policies)))
    if timing is not None:
        listed.append(("generate", f"{timing.generate_s:.2f} s"))
        listed.append(("tools", f"{timing.tools_s:.2f} s"))
        if timing.thinking_tokens:
            listed.append(("thinking", f"{timing.thinking_tokens:,} tokens"))
        if timing.reward is not None:
            listed.append(("reward", f"{timing.reward:g}"))
    return tuple((label, value) for label, value in listed if value)


def _table_rows(episode: Episode, sequence: int, start: int) -> list[dict[str, Any]]:
    track = episode.tracks[sequence]
    end = min(start + ROWS_PER_TABLE, len(track))
    texts = episode.texts_of(sequence, start, end)
    return [
        {
            "index": i,
            "text": texts[i - start],
            "id": int(track.token_ids[i]),
            "author": ("prompt", "policy", "environment", "forced")[track.authors[i]],
            "logprob": float(track.logprobs[i]),
            "trainer": float(track.trainer_logprobs[i]),
            "difference": float(track.trainer_logprobs[i]) - float(track.logprobs[i]),
            "advantage": float(track.advantages[i]),
            "entropy": float(track.entropy[i]),
            "weight": float(track.weights[i]),
            "mask": ("not trained", "trained", "", "not known")[track.mask[i]],
            "policy": f"{track.epochs[i]}:{track.versions[i]}" if track.versions[i] >= 0 else "",
        }
        for i in range(start, end)
    ]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:g}"
