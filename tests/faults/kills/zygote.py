"""Forks processes that have everything imported: `python -m tests.faults.kills.zygote`.

Reads one command per line and runs it in a process of its own; answers `{"pid": N}` when that
has started and `{"status": N}` (as of `waitstatus_to_exitcode`) when it has ended. One at a time.
Importing torch takes seconds, a fork takes milliseconds.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.kills.child import Life, replay, run_life
from tests.faults.kills.sharded_learner import ShardedLife, run_sharded
from tests.support.tiny_ranks import write_model
from tests.support.vision_models import make_vision_model

# An abandoned process ends after this time.
LIFE_S = 300


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(command)
        _say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        _say({"status": os.waitstatus_to_exitcode(status)})


def _say(answer: dict[str, int]) -> None:
    print(json.dumps(answer), flush=True)


def _child(command: dict[str, Any]) -> None:
    """Run the child; never returns. It ends in time if no test is left to kill it."""
    signal.alarm(LIFE_S)
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    code = 1
    try:
        _WORK[command["name"]](command["arguments"])
        code = 0
    except Exception:  # noqa: BLE001 - the log is the only place to report it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(arguments: dict[str, Any]) -> None:
    arguments["folder"], arguments["model"] = Path(arguments["folder"]), Path(arguments["model"])
    run_life(Life(**arguments))


def _live_sharded(arguments: dict[str, Any]) -> None:
    for name in ("folder", "model", "forge"):
        arguments[name] = Path(arguments[name])
    run_sharded(ShardedLife(**arguments))


def _replay(arguments: dict[str, Any]) -> None:
    asyncio.run(replay(Path(arguments["folder"]), Path(arguments["model"])))


def _model(arguments: dict[str, Any]) -> None:
    write_model(Path(arguments["folder"]))


def _vision_model(arguments: dict[str, Any]) -> None:
    make_vision_model(Path(arguments["folder"]), "qwen3_vl")


_WORK: dict[str, Callable[[dict[str, Any]], None]] = {
    "live": _live,
    "live-sharded": _live_sharded,
    "replay": _replay,
    "model": _model,
    "vision-model": _vision_model,
}

if __name__ == "__main__":
    main()
