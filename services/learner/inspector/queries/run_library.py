"""Everything that pages read of the runs in a folder, with the state kept between requests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock

from services.learner.inspector.queries.episodes import EpisodeShelf, RunTokenizer
from services.learner.inspector.queries.metric_series import METRICS_FILE, MetricSeries
from services.learner.inspector.queries.page_holds import PageHolds
from services.learner.inspector.queries.run_folders import RunCard, find_run, list_runs

LoadTokenizer = Callable[[Path], RunTokenizer]


@dataclass(slots=True)
class OpenRun:
    """One run that pages were read of."""

    folder: Path
    metrics: MetricSeries
    holds: PageHolds
    load_tokenizer: LoadTokenizer
    _lock: Lock
    _shelf: EpisodeShelf | None = None

    @property
    def shelf(self) -> EpisodeShelf:
        """Its episodes; the first use loads its tokenizer."""
        with self._lock:
            if self._shelf is None:
                self._shelf = EpisodeShelf(self.folder, self.load_tokenizer(self.folder))
            return self._shelf


class RunLibrary:
    """The runs of one folder. Usable from several threads."""

    def __init__(self, runs: Path, load_tokenizer: LoadTokenizer) -> None:
        self._runs = runs
        self._load_tokenizer = load_tokenizer
        self._lock = Lock()
        self._open: dict[str, OpenRun] = {}

    @cached_property
    def name(self) -> str:
        return str(self._runs)

    def cards(self) -> list[RunCard]:
        """List the runs, newest activity first."""
        return list_runs(self._runs)

    def open(self, run_id: str) -> OpenRun:
        """Return a run. Raises NotFoundError."""
        folder = find_run(self._runs, run_id)
        with self._lock:
            if run_id not in self._open:
                self._open[run_id] = OpenRun(
                    folder,
                    MetricSeries(folder / METRICS_FILE),
                    PageHolds(folder),
                    self._load_tokenizer,
                    Lock(),
                )
            return self._open[run_id]

    def close(self) -> None:
        """Release what the journal holds for open pages."""
        with self._lock:
            for run in self._open.values():
                run.holds.release()
