"""Everything that pages read of the runs in a folder, cached between requests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_reading.inspector.queries.episodes import EpisodeShelf, RunTokenizer
from flotilla_reading.inspector.queries.page_holds import PageHolds
from flotilla_reading.inspector.queries.run_folders import RunCard, find_run, list_runs
from flotilla_reading.metric_series import MetricSeries

LoadTokenizer = Callable[[Path], RunTokenizer]


@dataclass(slots=True)
class OpenRun:
    """One run that pages have been read from."""

    folder: Path
    metrics: MetricSeries
    holds: PageHolds
    load_tokenizer: LoadTokenizer
    _lock: Lock
    _shelf: EpisodeShelf | None = None

    @property
    def shelf(self) -> EpisodeShelf:
        """Episodes of the run; the first use loads its tokenizer."""
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
        """Release the holds of open pages."""
        with self._lock:
            for run in self._open.values():
                run.holds.release()
