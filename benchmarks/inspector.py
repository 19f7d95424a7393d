"""Cost of the inspector: `python -m benchmarks.inspector [--pairs 30] [--pages 20]`.

A learner in a process of its own hands out groups and takes in trajectories of 2,000 tokens, and
the inspector shows its run. In every other window of whole steps many pages of the run are open, so
that the cost of one exceeds what chance adds to all: each reads its live board every 2 s, as a
visible page does, and holds an attempt back from pruning. Then a headless Chromium opens the token
view of an episode of 50 turns and 60,000 tokens, again and again. The last line is one JSON object:

- `learner_cpu_ratio`: CPU of the learner per trajectory in all windows with open pages over that in
  all without, and its standard error, from pairs of windows drawn again and again.
- `learner_cpu_of_a_page`: the share that one open page adds, and its error: the above, less 1, over
  the number of pages.
- `learner_cores`, `inspector_cores`: CPU of both while the pages are open, in cores.
- `open_s`: seconds until the token view is ready, median, and the worst; the first opening, which
  also starts what both sides keep, is `first_open_s`.
- `open_cpu_s`: CPU seconds of an opening, median: of the inspector, and of the browser.
- `tokens` of the episode, and the machine's load at the end.

About 7 minutes. Without Chromium the last three are left out.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import numpy as np
import psutil
import pytest

from benchmarks.in_flight import Flight, steady_learner
from benchmarks.timed_learner import TimedLearner
from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.telemetry import log
from tests.reading.inspector.made_runs import RUN, MadeAttempt, MadeRun, conversation, open_run
from tests.reading.inspector.served_pages import ServedPages, browsing, serving, watched_page

ATTEMPTS, ATTEMPT_S = 256, 10.0
# As live.js and attempt.js do.
POLL_S, HOLD_EVERY = 2.0, 10
# Steps of a window.
STEPS = 2
_POLL_STEP_S = 0.05
EPISODE = AttemptKey("g000000r0", 0, 0)


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """CPU seconds of a window, and the trajectories that came in it."""

    learner_s: float
    inspector_s: float
    seconds: float
    taken: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--opens", type=int, default=7)
    given = parser.parse_args()
    log.setup("benchmark", "", level="ERROR")
    found = measure_opening(given.opens) if given.opens else {}
    if given.pairs:
        print(json.dumps(found), flush=True)
        found |= asyncio.run(measure_load(given.pairs, given.pages))
    print(json.dumps({**found, "load": os.getloadavg()[0]}))


async def measure_load(pairs: int, pages: int) -> dict[str, Any]:
    """Return the learner's CPU with open pages over that without."""
    async with steady_learner(ATTEMPTS, ATTEMPT_S) as (learner, flight, folder):
        with serving(folder, "--run", "run") as served:
            return await _compare_windows(learner, flight, served, pairs, pages)


async def _compare_windows(
    learner: TimedLearner, flight: Flight, served: ServedPages, pairs: int, pages: int
) -> dict[str, Any]:
    opener = build_opener(HTTPCookieProcessor())
    await asyncio.to_thread(_read, opener, served.url)
    windows: dict[bool, list[LoadWindow]] = {True: [], False: []}
    for number in range(pairs):
        # In turns, so that what changes slowly falls on both.
        for is_open in (True, False) if number % 2 else (False, True):
            tabs = range(pages) if is_open else ()
            reading = (_keep_open(opener, served.base, POLL_S * tab / pages) for tab in tabs)
            async with running_tasks(*reading):
                windows[is_open].append(await _watch(learner, flight, served))
    opened, alone = windows[True], windows[False]
    seconds = sum(window.seconds for window in opened)
    chosen = np.random.default_rng(0).integers(0, pairs, (1000, pairs))
    again = [_ratio([opened[n] for n in draw], [alone[n] for n in draw]) for draw in chosen]
    ratio, error = _ratio(opened, alone), float(np.std(again))
    return {
        "learner_cpu_ratio": [round(ratio, 4), round(error, 4)],
        "learner_cpu_of_a_page": [round((ratio - 1) / pages, 5), round(error / pages, 5)],
        "learner_cores": round(sum(window.learner_s for window in opened) / seconds, 3),
        "inspector_cores": round(sum(window.inspector_s for window in opened) / seconds, 4),
    }


def _ratio(opened: Sequence[LoadWindow], alone: Sequence[LoadWindow]) -> float:
    """Return the learner's CPU per trajectory, with an open page over without."""
    with_page, without = (
        sum(each.learner_s for each in windows) / sum(each.taken for each in windows)
        for windows in (opened, alone)
    )
    return with_page / without


async def _watch(learner: TimedLearner, flight: Flight, served: ServedPages) -> LoadWindow:
    """Watch from the end of a step to that of a later one: a part of a step costs what it holds."""

    def now() -> tuple[float, float, float, int]:
        pids = (learner.pid, served.process.pid)
        return time.monotonic(), _cpu_s(pids[0]), _cpu_s(pids[1]), flight.taken

    async def end_step(number: int) -> None:
        while len(learner.read_steps()) < number:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_STEP_S)

    done = len(learner.read_steps()) + 1
    await end_step(done)
    before = now()
    await end_step(done + STEPS)
    seconds, own, inspector, taken = (b - a for a, b in zip(before, now(), strict=True))
    return LoadWindow(own, inspector, seconds, int(taken))


async def _keep_open(opener: OpenerDirector, base: str, delay_s: float) -> None:
    """Do what an open page does: the run's, and an attempt's in a second tab."""
    page = f"{base}/runs/run"
    await asyncio.sleep(delay_s)
    await asyncio.to_thread(_read, opener, page)
    for number in range(1 << 30):
        board = await asyncio.to_thread(_read, opener, f"{page}/live.html")
        if number % HOLD_EVERY == 0 and (link := _first_attempt(board)):
            await asyncio.to_thread(_read, opener, f"{base}{link}/hold")
        await asyncio.sleep(POLL_S)


def _first_attempt(board: str) -> str:
    _, found, rest = board.partition('href="/runs/run/attempts/')
    path = rest.partition('"')[0]
    return f"/runs/run/attempts/{path}" if found else ""


def _read(opener: OpenerDirector, url: str) -> str:
    with opener.open(url) as page:
        return page.read().decode()


def _cpu_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


def measure_opening(opens: int) -> dict[str, Any]:
    """Return the time and CPU of opening a long episode's tokens."""
    with tempfile.TemporaryDirectory() as place:
        run = asyncio.run(_make_long_run(Path(place)))
        tokens = len(run.trajectories[EPISODE].sequences[0].token_ids)
        try:
            with (
                browsing() as browser,
                serving(run.folder.parent) as served,
                watched_page(browser) as watched,
            ):
                watched.page.goto(served.url)
                watched.page.goto("about:blank")
                found = [_open_once(watched.page, served) for _ in range(opens)]
        except pytest.skip.Exception as error:
            print(f"no browser: {error}")
            return {}
    return {**_summarise_opens(found), "tokens": tokens}


async def _make_long_run(folder: Path) -> MadeRun:
    run = open_run(folder / "runs")
    await run.journal.begin_epoch(1)
    attempts = (MadeAttempt(conversation(50, words=290), 0.0), MadeAttempt(conversation(2), 1.0))
    await run.plan_step(1, [await run.add_group(attempts)])
    await run.journal.close()
    return run


def _open_once(page: Any, served: ServedPages) -> tuple[float, float, float]:
    """Return the seconds of an opening, and the CPU seconds of both sides."""
    ours = psutil.Process(served.process.pid)
    before, began = (_used([ours]), _used(_browser_processes())), time.perf_counter()
    where = f"{EPISODE.group_id}/{EPISODE.attempt_index}/{EPISODE.attempt_try}"
    page.goto(f"{served.base}/runs/{RUN}/attempts/{where}?view=tokens", wait_until="commit")
    page.wait_for_selector("#token-view[data-ready]")
    seconds = time.perf_counter() - began
    after = (_used([ours]), _used(_browser_processes()))
    page.goto("about:blank")
    return seconds, after[0] - before[0], after[1] - before[1]


def _browser_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "chrom" in child.name()]


def _used(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
    return total


def _summarise_opens(found: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    later = found[1:] or found
    seconds = [each[0] for each in later]
    return {
        "first_open_s": round(found[0][0], 2),
        "open_s": [round(statistics.median(seconds), 2), round(max(seconds), 2)],
        "open_cpu_s": [round(statistics.median(each[n] for each in later), 2) for n in (1, 2)],
    }


if __name__ == "__main__":
    main()
