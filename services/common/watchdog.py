"""Names the stage that stands still, and writes down what every thread and task was doing.

It never ends anything: whoever decides to kill finds the evidence already there.
"""

import asyncio
import faulthandler
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from services.common.log import get_logger

EVENT_LOOP = "event_loop"
_log = get_logger(__name__)


@dataclass(slots=True)
class _Stage:
    name: str
    limit_s: float
    moved_at: float
    report_after_s: float


@dataclass(frozen=True, slots=True)
class Standstill:
    """A stage without progress for `seconds`, which is more than its limit."""

    stage: str
    seconds: float


class Stages:
    """The stages that are open, and which of them stand still. Pure: the caller brings the time.

    A stage is reported when it passes its limit, and again at each doubling of that time.
    """

    def __init__(self) -> None:
        self._open: list[_Stage] = []
        self._lock = threading.Lock()

    def enter(self, name: str, limit_s: float, now: float) -> _Stage:
        stage = _Stage(name, limit_s, now, limit_s)
        with self._lock:
            self._open.append(stage)
        return stage

    def leave(self, stage: _Stage) -> None:
        with self._lock:
            # By identity: two tasks may be in equal stages.
            self._open[:] = [other for other in self._open if other is not stage]

    def progress(self, name: str, now: float) -> None:
        with self._lock:
            for stage in self._open:
                if stage.name == name:
                    stage.moved_at, stage.report_after_s = now, stage.limit_s

    def standstills(self, now: float) -> list[Standstill]:
        found: list[Standstill] = []
        with self._lock:
            for stage in self._open:
                still = now - stage.moved_at
                if still > stage.report_after_s:
                    stage.report_after_s = 2 * still
                    found.append(Standstill(stage.name, still))
        return found


class Watchdog:
    """Looks at the stages from a thread of its own, so that a blocked event loop is seen too."""

    def __init__(
        self,
        *,
        limit_s: float = 120.0,
        loop_limit_s: float = 10.0,
        interval_s: float = 1.0,
        dump_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._loop_limit_s = loop_limit_s
        self._interval_s = interval_s
        self._dump_folder = dump_folder
        self._clock = clock
        self._stages = Stages()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def stage(self, name: str, limit_s: float | None = None) -> Generator[None]:
        """Report `name` if the block takes longer than the limit without `progress(name)`."""
        stage = self._stages.enter(name, limit_s or self._limit_s, self._clock())
        try:
            yield
        finally:
            self._stages.leave(stage)

    def progress(self, name: str) -> None:
        """The open stage `name` has moved: its time starts again."""
        self._stages.progress(name, self._clock())

    def standstills(self, now: float) -> list[Standstill]:
        """The stages to report at `now`; each call counts as their report."""
        return self._stages.standstills(now)

    @contextmanager
    def running(self) -> Generator[None]:
        """Watch while the block runs; call it on the event loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._stop.clear()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with self.stage(EVENT_LOOP, self._loop_limit_s):
                yield
        finally:
            self._stop.set()
            # Not joined: the thread may be writing a dump, and it holds nothing up.

    def dump(self, out: TextIO) -> None:
        """Write the stacks of all threads and asyncio tasks to `out`, a file with a descriptor."""
        out.write("threads\n")
        out.flush()
        faulthandler.dump_traceback(out, all_threads=True)
        if self._loop is not None:
            out.write(_tasks(self._loop))
        out.flush()

    def _watch(self) -> None:
        loop = self._loop
        while loop is not None and not self._stop.wait(self._interval_s):
            if loop.is_closed():
                return
            for standstill in self.standstills(self._clock()):
                self._report(standstill)
            try:
                loop.call_soon_threadsafe(self.progress, EVENT_LOOP)
            except RuntimeError:  # closed in between: nothing is left to watch
                return

    def _report(self, standstill: Standstill) -> None:
        _log.error(
            "a stage stands still",
            stage=standstill.stage,
            seconds=round(standstill.seconds, 1),
            stacks=self._write(standstill.stage),
        )

    def _write(self, stage: str) -> str:
        """Write the dump; returns where it is."""
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


def _tasks(loop: asyncio.AbstractEventLoop) -> str:
    text = io.StringIO()
    text.write("\nasyncio tasks\n")
    for task in asyncio.all_tasks(loop):
        text.write(f"\n{task.get_name()} {task.get_coro()!r}\n")
        task.print_stack(limit=12, file=text)
    return text.getvalue()
