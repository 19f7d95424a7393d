"""A watchdog that names the stalled stage, and writes the stacks of all threads and tasks.

It never ends anything: by the time an operator decides to kill, the evidence is there."""

import asyncio
import faulthandler
import io
import itertools
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO, cast

from flotilla_common.telemetry.log import get_logger

EVENT_LOOP = "event_loop"
_log = get_logger(__name__)


@dataclass(slots=True)
class _OpenStages:
    """All open stages of one name, by number; `moved_at` is the last progress of any of them."""

    limit_s: float
    report_after_s: float
    entered_at: dict[int, float] = field(default_factory=dict[int, float])
    moved_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Standstill:
    """A stage without progress for `seconds`, the longest among `count` open ones of its name."""

    stage: str
    seconds: float
    count: int = 1


class Stages:
    """The open stages, and those that are stalled. Pure: the caller passes the time.

    A name is reported when one of its stages passes the limit, and again each time the wait
    doubles: once for all of them, because hundreds of calls may wait for the same thing. Entering
    and leaving take constant time.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, _OpenStages] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def enter(self, name: str, limit_s: float, now: float) -> tuple[str, int]:
        """Enter a stage; return the argument for `leave`.

        The newest limit of a name counts for all of it."""
        number = next(self._numbers)
        with self._lock:
            stages = self._by_name.get(name)
            if stages is None:
                stages = self._by_name[name] = _OpenStages(limit_s, limit_s)
            stages.limit_s = limit_s
            stages.entered_at[number] = now
        return name, number

    def leave(self, entered: tuple[str, int]) -> None:
        name, number = entered
        with self._lock:
            del self._by_name[name].entered_at[number]

    def note_progress(self, name: str, now: float) -> None:
        """Note that all open stages of this name have moved."""
        with self._lock:
            stages = self._by_name.get(name)
            if stages is not None:
                stages.moved_at = now

    def take_standstills(self, now: float) -> list[Standstill]:
        found: list[Standstill] = []
        with self._lock:
            for name, stages in self._by_name.items():
                oldest = min(stages.entered_at.values(), default=now)
                still = now - max(oldest, stages.moved_at)
                if still <= stages.limit_s:
                    stages.report_after_s = stages.limit_s
                elif still > stages.report_after_s:
                    stages.report_after_s = 2 * still
                    found.append(Standstill(name, still, len(stages.entered_at)))
        return found


class Watchdog:
    """Observer of the stages in a separate thread, so that it sees a blocked event loop too."""

    def __init__(
        self,
        *,
        limit_s: float = 120.0,
        loop_limit_s: float = 10.0,
        interval_s: float = 1.0,
        dump_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # The limit of stages that set none.
        self.limit_s = limit_s
        self._loop_limit_s = loop_limit_s
        self._interval_s = interval_s
        # Called with each report, in the watchdog's thread.
        self.on_standstill: Callable[[Standstill], None] = lambda standstill: None
        self._dump_folder = dump_folder
        self._clock = clock
        self._stages = Stages()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def stage(self, name: str, limit_s: float | None = None) -> Generator[None]:
        """Report `name` if the block exceeds the limit without `note_progress(name)`."""
        stage = self._stages.enter(name, limit_s or self.limit_s, self._clock())
        try:
            yield
        finally:
            self._stages.leave(stage)

    def note_progress(self, name: str) -> None:
        """Note that the open stages `name` have moved: their timers restart."""
        self._stages.note_progress(name, self._clock())

    def take_standstills(self, now: float) -> list[Standstill]:
        """Return the stages to report at `now`; each call counts as their report."""
        return self._stages.take_standstills(now)

    @contextmanager
    def running(self) -> Generator[None]:
        """Watch while the block runs; call it on the event loop to watch."""
        self._loop = asyncio.get_running_loop()
        self._stop.clear()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with self.stage(EVENT_LOOP, self._loop_limit_s):
                yield
        finally:
            self._stop.set()
            # Not joined: the thread may be writing a dump, and it blocks nothing.

    def dump(self, out: TextIO) -> None:
        """Write the stacks of all threads and asyncio tasks to `out`, a file with a descriptor."""
        out.write("threads\n")
        out.flush()
        faulthandler.dump_traceback(out, all_threads=True)
        if self._loop is not None:
            out.write(_format_tasks(self._loop))
        out.flush()

    def _watch(self) -> None:
        loop = self._loop
        while loop is not None and not self._stop.wait(self._interval_s):
            if loop.is_closed():
                return
            for standstill in self.take_standstills(self._clock()):
                self._report(standstill)
            try:
                loop.call_soon_threadsafe(self.note_progress, EVENT_LOOP)
            except RuntimeError:  # closed meanwhile: nothing is left to watch
                return

    def _report(self, standstill: Standstill) -> None:
        _log.error(
            "a stage stands still",
            stage=standstill.stage,
            seconds=round(standstill.seconds, 1),
            open=standstill.count,
            stacks=self._write_dump(standstill.stage),
        )
        self.on_standstill(standstill)

    def _write_dump(self, stage: str) -> str:
        """Write the dump; return where it is."""
        if self._dump_folder is None:
            self.dump(sys.__stderr__ or sys.stderr)
            return "stderr"
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", stage)
        path = self._dump_folder / f"{plain}-{os.getpid()}-{time.time_ns() // 10**6}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                self.dump(file)
        except OSError as error:  # a full disk must not silence the report itself
            return f"not written: {error}"
        return str(path)


def _format_tasks(loop: asyncio.AbstractEventLoop) -> str:
    text = io.StringIO()
    text.write("\nasyncio tasks\n")
    for task in asyncio.all_tasks(loop):
        text.write(f"\n{task.get_name()} {task.get_coro()!r}\n")
        text.writelines(traceback.format_list([_summarize(f) for f in task.get_stack(limit=12)]))
    return text.getvalue()


def _summarize(frame: FrameType) -> traceback.FrameSummary:
    """Summarize a frame of a task that may be running; between two lines it has no line number."""
    code = frame.f_code
    # The stubs type it as int, but it may be None, and then `Task.print_stack` fails.
    line = cast("int | None", frame.f_lineno) or code.co_firstlineno
    return traceback.FrameSummary(code.co_filename, line, code.co_name)
