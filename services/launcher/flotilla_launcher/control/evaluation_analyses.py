"""Analyses of evaluations, each by a program of `flotilla_reading` that the launcher starts once
the episodes of an evaluation are dumped."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command, tied_command
from flotilla_common.process.run_child import run_child
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.dump_files import AGGREGATED, ANALYSES, find_evaluations
from flotilla_launcher.config.launcher import parse_launcher
from flotilla_launcher.control.background_loops import run_safely
from flotilla_launcher.store.ledger import Ledger

# Not imported: services know no reader. It lowers its own priority.
_ANALYSIS = "flotilla_reading.analysis"
_READERS = "flotilla_reading"
_LOG = "logs/analysis.log"
_LOOK_S = 2.0
# For one analysis, and for those that are left when the launcher ends.
_MOST_S, _GRACE_S = 300.0, 20.0


@asynccontextmanager
async def analyzed_runs(runs: Path) -> AsyncGenerator[None]:
    """Analyze evaluations of the runs in this folder during the block, and a little longer: the
    last evaluation of a run comes with its end."""
    store = Ledger(runs / "launcher.sqlite")
    analyses = EvaluationAnalyses(runs, store)
    try:
        async with running_tasks(analyses.watch_evaluations()):
            yield
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await run_safely(analyses.analyze_pending, "analyzing evaluations")
    finally:
        store.close()


class EvaluationAnalyses:
    """Starts one analysis at a time. No run waits for it, nor fails because of it."""

    def __init__(self, runs: Path, store: Ledger) -> None:
        self._runs = runs
        self._store = store
        # Runs whose evaluations may not all be analyzed; one that has ended is looked at once more.
        self._open = set[str]()
        # Dumps that were analyzed, or could not be, by when they were written.
        self._tried = set[tuple[Path, float]]()
        self._told = set[str]()

    async def watch_evaluations(self) -> None:
        """Look for evaluations without an analysis, until cancelled."""
        while True:
            await run_safely(self.analyze_pending, "analyzing evaluations")
            await asyncio.sleep(_LOOK_S)

    async def analyze_pending(self) -> None:
        """Analyze the dumped evaluations of open runs that have no analysis yet, oldest first."""
        live = {
            each.run.run_id
            for each in self._store.list_unended()
            if _wants_analysis(each.spec_json)
        }
        seen = sorted(live | self._open)
        self._open |= live
        for run_id in seen:
            for version, folder in find_evaluations(self._runs / run_id):
                await self._analyze(self._runs / run_id, version, folder)
        self._open = live

    async def _analyze(self, run_dir: Path, version: int, folder: Path) -> None:
        written = (folder / AGGREGATED).stat().st_mtime
        found = run_dir / ANALYSES / f"step_{version}.json"
        known = (folder, written) in self._tried
        if known or (found.exists() and found.stat().st_mtime >= written):
            return
        if find_spec(_READERS) is None:
            self._tell_once(run_dir, f"no analysis: {_READERS} is not installed here")
            return
        command = python_command("-m", _ANALYSIS, str(run_dir), "--step", str(version))
        tied = tied_command(signal.SIGKILL, *command)
        try:
            ended = await run_child(tied, env=child_environment(ours=True), seconds=_MOST_S)
            said = (ended.output + ended.errors).decode(errors="replace").strip()
        except TimeoutError:
            said = f"the analysis of version {version} took more than {_MOST_S:g} s"
        self._tried.add((folder, written))
        _tell(run_dir, said)

    def _tell_once(self, run_dir: Path, text: str) -> None:
        if run_dir.name not in self._told:
            self._told.add(run_dir.name)
            _tell(run_dir, text)


@lru_cache(256)
def _wants_analysis(spec_json: str) -> bool:
    """Return what a spec says; the specs of all live runs are asked about every two seconds."""
    try:
        return parse_launcher(json.loads(spec_json)).analysis
    except ConfigError:
        # Another version of the launcher may have started the run.
        return False


def _tell(run_dir: Path, text: str) -> None:
    with (run_dir / _LOG).open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")
