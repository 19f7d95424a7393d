"""Content of each page: the values for its template."""

import base64
from collections.abc import Sequence
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.eval_groups import MAIN_SET
from flotilla_common.episodes.imitated_attempts import imitating_step
from flotilla_common.text.parsing import as_object
from flotilla_reading.analysis.analysis_files import analysis_page
from flotilla_reading.inspector.pages.charts import WIDTH, Chart, draw_chart
from flotilla_reading.inspector.pages.curves import DEFAULT_METRIC, read_curve
from flotilla_reading.inspector.pages.links import Links
from flotilla_reading.inspector.pages.messages import attempt_facts, shown_messages
from flotilla_reading.inspector.pages.page import Crumb, Page, embed
from flotilla_reading.inspector.pages.token_data import MOST_TOKENS, token_data
from flotilla_reading.inspector.queries.episodes import Episode
from flotilla_reading.inspector.queries.imitated_steps import read_imitated
from flotilla_reading.inspector.queries.live_board import read_live_board
from flotilla_reading.inspector.queries.run_folders import (
    NotFoundError,
    describe_run,
    read_journal,
)
from flotilla_reading.inspector.queries.run_library import RunLibrary
from flotilla_reading.inspector.queries.step_pages import (
    STEPS_PER_PAGE,
    EvalCard,
    StepCard,
    list_evals,
    list_steps,
    read_eval,
    read_step,
)
from flotilla_reading.inspector.queries.token_tracks import TokenTrack

# Metrics of a step, in the list of steps and on its page.
STEP_METRICS = (
    ("reward/avg_raw_reward", "reward"),
    ("reward/avg_pass_at_1", "pass@1"),
    ("reward/variance_per_prompt", "variance"),
    ("policy/entropy", "entropy"),
    ("mismatch/kl_train_infer", "KL engine/trainer"),
    ("sft/loss", "loss"),
    ("sft/heldout_loss", "held-out loss"),
    ("policy/grad_norm", "gradient norm"),
)
ROWS_PER_TABLE = 500


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
            **self._steps_table(run_id, steps),
            "evals": evals,
            "board": read_live_board(run.folder),
            "newest": run.metrics.newest(),
            "chart": self._progress(run_id, evals),
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
            **self._steps_table(run_id, steps),
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
        values: dict[str, Any] = {"found": found, "groups": found.trained, "numbers": numbers}
        if not found.attempts:
            values["imitated"] = read_imitated(run.folder, step).sequences
            return Page("imitated_step.html", f"Step {step}", self._below(run_id, values))
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
        if not self._inline and imitating_step(key.group_id) is None:
            run.holds.hold(key.group_id)
        return run.shelf.read(key)

    def conversation(self, run_id: str, episode: Episode) -> Page:
        """Show the conversation."""
        messages = shown_messages(self._links, run_id, episode)
        values = {"messages": messages, "view": "conversation"}
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

    def _below(self, run_id: str, values: dict[str, Any]) -> dict[str, Any]:
        crumbs = (Crumb(run_id, self._links.run(run_id)),)
        return {"run": run_id, "crumbs": crumbs, **values}

    def _progress(self, run_id: str, evals: Sequence[EvalCard]) -> Chart | None:
        """Draw whether a run learns."""
        results = [(each.version, as_object(each.results.get(MAIN_SET))) for each in evals[::-1]]
        passed = [(step, float(each["pass_at_1"])) for step, each in results if "pass_at_1" in each]
        intervals = [(step, *each["ci95"]) for step, each in results if "ci95" in each]
        rewards = read_curve(self._library, run_id, DEFAULT_METRIC, WIDTH // 2)
        trained = list(zip(rewards.steps, rewards.values, strict=True))
        return draw_chart({"held-out pass@1": passed, "training reward": trained}, intervals)

    def _steps_table(self, run_id: str, steps: Sequence[StepCard]) -> dict[str, Any]:
        """Return steps with the metrics that any of them has: imitation and reinforcement learning
        have others."""
        metrics = self._step_metrics(run_id, [each.step for each in steps])
        known = {name for values in metrics.values() for name in values}
        shown = [pair for pair in STEP_METRICS if pair[0] in known]
        return {"steps": steps, "metrics": metrics, "step_metrics": shown or STEP_METRICS[:1]}

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
