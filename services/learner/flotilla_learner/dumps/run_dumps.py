"""Dumps as seen by the run: it offers steps and evaluations, and never waits.

A separate process writes the files. A job that it cannot accept or write is a counted loss, logged
once: dumps never fail or delay a step."""

import asyncio
from collections import deque
from pathlib import Path

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.line_channel import ChildLostError, LineChannel
from flotilla_common.process.python_command import python_command
from flotilla_common.process.runtime import Runtime
from flotilla_common.telemetry import metrics
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.json_lines import decode_line
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dumps.jobs import (
    DumpJob,
    DumpReport,
    DumpSetup,
    EvalJob,
    ImitationJob,
    StepJob,
)
from flotilla_learner.journal.holds import JournalHolds
from flotilla_learner.types import StepResult

_MODULE = "flotilla_learner.dumps"
# Most waiting jobs; a step's token values stay in shared memory meanwhile.
MOST_WAITING = 8
# A job without an answer for this long is lost, and its process replaced.
_ANSWER_S = 600.0
# Time at the end of a run for waiting jobs, and then for their uploads.
FINISH_S = 30.0
_CLOSE_S = 25.0
# Pause between the end of a failed process and the start of the next.
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# Credentials for stores, which the process opens itself.
_STORE_VARIABLES = ("AWS_*", "GOOGLE_*", "AZURE_*", "FSSPEC_*", "FLOTILLA_REMOTE_OPTIONS")
_losses = metrics.event_counter(
    "flotilla_dump_losses", "Files of dumps that were not written or not uploaded"
)
_log = get_logger(__name__)


def dump_setup_of(runtime: Runtime[LearnerConfig]) -> DumpSetup | None:
    """Configure the dumps of a run; return None if it keeps none."""
    config, policy = runtime.config.dumps, runtime.shared.policy
    if not config.enabled:
        return None
    checkpoint = runtime.config.checkpoint
    uploads = config.remote and checkpoint.remote is not None
    return DumpSetup(
        str(runtime.run_dir),
        *(policy.model, policy.revision, config.every, config.keep),
        config.picture_bytes,
        remote=f"{checkpoint.remote}/{runtime.run_id}" if uploads else None,
        remote_options=dict(checkpoint.remote_options),
    )


class Dumps:
    """Files that keep the episodes of steps and evaluations. By default there are none."""

    def offer_step(self, step: int, result: StepResult) -> None:
        """Take a finished step, and the file of its token values."""
        if result.token_file is not None:
            result.token_file.unlink(missing_ok=True)

    def offer_imitation(self, job: ImitationJob) -> None:
        """Take a finished step that imitated, and the file of its token values."""
        job.discard()

    def offer_eval(self, eval_id: str, moment: str, version: int, logged: dict[str, float]) -> None:
        """Take a finished evaluation of policy `version`, with its logged metrics."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of dumps, over this start of the run."""
        return {}

    def hold_in(self, holds: JournalHolds) -> None:
        """Make a journal keep data that dumps have yet to read, or that kept dumps refer to."""

    async def finish(self) -> None:
        """Wait for the offered dumps, for a bounded time."""


class RunDumps(Dumps):
    """Passes jobs to the process that writes dumps, one at a time.

    The first job starts the process; a job after its end starts it again."""

    def __init__(self, setup: DumpSetup, log_path: Path) -> None:
        self._setup = setup
        self._log_path = log_path
        self._waiting: deque[DumpJob] = deque()
        # Job that the process is doing.
        self._current: DumpJob | None = None
        self._process: LineChannel | None = None
        self._holds: JournalHolds | None = None
        self._pause_s = _PAUSE_S
        self._change = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self._lost = 0
        self._bytes = 0

    def offer_step(self, step: int, result: StepResult) -> None:
        token_file = str(result.token_file) if result.token_file else None
        self._offer(StepJob(step, step - 1, token_file))

    def offer_imitation(self, job: ImitationJob) -> None:
        self._offer(job)

    def offer_eval(self, eval_id: str, moment: str, version: int, logged: dict[str, float]) -> None:
        self._offer(EvalJob(eval_id, moment, version, logged))

    @property
    def lost(self) -> int:
        """Number of files, or of whole jobs, that were lost."""
        return self._lost

    @property
    def waiting(self) -> int:
        """Number of jobs that the process has not received yet."""
        return len(self._waiting)

    @property
    def unwritten(self) -> tuple[DumpJob, ...]:
        """Jobs whose files are not written yet."""
        current = () if self._current is None else (self._current,)
        return (*current, *self._waiting)

    def metrics(self) -> dict[str, float]:
        return {"dumps/lost": float(self._lost), "dumps/bytes": float(self._bytes)}

    def hold_in(self, holds: JournalHolds) -> None:
        self._holds = holds
        holds.kept_steps = self._setup.keep

    async def finish(self) -> None:
        """See `Dumps`; whatever is left then is lost."""
        try:
            async with asyncio.timeout(FINISH_S):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("the run ends before its dumps are written", jobs=len(self.unwritten))

    async def close(self) -> None:
        """End the process; jobs that it has not finished are lost. May be called again."""
        if self._task is not None:
            task, self._task = self._task, None
            await cancel_tasks([task])
        await self._end_process()
        if self._current is not None:
            self._waiting.appendleft(self._current)
            self._current = None
        while self._waiting:
            self._lose_job(self._waiting.popleft(), "the run ended before it was written")

    def _offer(self, job: DumpJob) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._lose_job(
                job, f"{MOST_WAITING} jobs already wait: the disk is slower than the run"
            )
            return
        self._waiting.append(job)
        self._hold_unwritten()
        self._idle.clear()
        self._change.set()
        if self._task is None:
            self._task = asyncio.create_task(self._do_jobs(), name="dumps")

    async def _do_jobs(self) -> None:
        while True:
            while not self._waiting:
                self._idle.set()
                self._change.clear()
                await self._change.wait()
            self._current = self._waiting.popleft()
            try:
                await self._do_job(self._current)
            except (OSError, ValueError, ChildLostError) as error:
                self._lose_job(self._current, str(error) or repr(error))
                await self._kill_process()
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            else:
                self._pause_s = _PAUSE_S
            self._current = None
            self._hold_unwritten()

    def _hold_unwritten(self) -> None:
        if self._holds is not None:
            jobs = self.unwritten
            self._holds.set_unwritten(
                (job.step for job in jobs if isinstance(job, StepJob)),
                (job.eval_id for job in jobs if isinstance(job, EvalJob)),
            )

    async def _do_job(self, job: DumpJob) -> None:
        """Have the process do a job. Raises ChildLostError, OSError, ValueError."""
        process = self._process
        if process is None or process.exit_code is not None:
            process = self._process = await LineChannel.start_child(
                *(
                    "the process of dumps",
                    python_command("-m", _MODULE),
                    self._log_path,
                    *_STORE_VARIABLES,
                )
            )
            process.send(self._setup)
        process.send(job)
        async with process.answering_within(_ANSWER_S):
            while (report := decode_line(DumpReport, await process.read_line())).done != job.name:
                self._take_report(report)
        self._take_report(report)
        if not report.lost:
            self._note_recovered()

    async def _end_process(self) -> None:
        """Let the process finish its uploads, for a bounded time."""
        process = self._process
        if process is None or process.exit_code is not None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                while True:
                    self._take_report(decode_line(DumpReport, await process.read_line()))
        except ChildLostError:
            # Its stdout ended, as expected.
            pass
        except ValueError as error:
            self._note_lost("uploads", str(error))
        except TimeoutError:
            _log.warning("the run ends before its dumps are uploaded")
        await self._kill_process()

    async def _kill_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    def _take_report(self, report: DumpReport) -> None:
        self._bytes += report.size_bytes
        for name, why in report.lost.items():
            self._note_lost(name, why)

    def _lose_job(self, job: DumpJob, why: str) -> None:
        job.discard()
        self._note_lost(job.name, why)

    def _note_lost(self, name: str, why: str) -> None:
        self._lost += 1
        _losses()()
        first, self._failing = not self._failing, True
        if first:
            _log.warning("dumps are lost; the run continues without them", dump=name, why=why)

    def _note_recovered(self) -> None:
        if self._failing:
            _log.info("dumps are written again", lost=self._lost)
        self._failing = False
