"""CPU time to read and to prepare a file of tasks, over that of `json.loads` on the same bytes.

    python -m benchmarks.task_files --tasks 20000 --pairs 5

Tasks are those of the shipped environments, 1.7 KB each. "read" is what a learner does at its
start: every task as the env_gateway reads it. "prepare" is `flotilla data prepare` without the
start of a process: reading, deciding, digests, and durable writing."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from flotilla_common.tasks.task_files import read_tasks
from flotilla_environments.task_generator import APPS
from flotilla_environments.tasks import make_tasks
from flotilla_reading.data.dataset_folder import describe, write_folder
from flotilla_reading.data.preparation import Wishes, prepare
from flotilla_reading.data.sources import fetch_source


def cpu_time_of(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def prepare_file(path: Path, out: Path) -> None:
    source, wishes = fetch_source(str(path), lambda *_: None), Wishes()
    prepared = prepare(source.read_rows(), wishes)
    write_folder(out, prepared, describe(prepared, wishes, source.to_dict(), None), "jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "tasks.json", Path(folder) / "data"
        made = list(make_tasks(list(APPS), "train", options.tasks))
        path.write_text(json.dumps({"tasks": made}), encoding="utf-8")
        rows: list[tuple[float, float, float]] = []
        for _ in range(options.pairs):
            rows.append(
                (
                    cpu_time_of(lambda: json.loads(path.read_text(encoding="utf-8"))),
                    cpu_time_of(lambda: list(read_tasks(path))),
                    cpu_time_of(lambda: prepare_file(path, out)),
                )
            )
        size = path.stat().st_size
    figures = {
        "tasks": options.tasks,
        "megabytes": round(size / 1e6, 1),
        "read_s": round(median(read for _, read, _ in rows), 2),
        "prepare_s": round(median(prepared for *_, prepared in rows), 2),
        "read_over_json": round(median(read / bare for bare, read, _ in rows), 2),
        "prepare_over_json": round(median(prepared / bare for bare, _, prepared in rows), 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
