"""Every measurement of a rank that needs a GPU, within ten minutes: `benchmarks.gpu_session`.

Runs `gpu_learner` as prime-rl measures itself, with the families of its kernels, and then as usual,
each without and with compiled blocks, and `rank_step`. Each has its own process and what is left of
`--limit` seconds; the most important ones come first. With `--tiny`: what a CPU can run of it. The
last line is one JSON object: the last line of each, or the reason why it has none.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

LIMIT_S = 540.0
_LEARNER, _STEP = "benchmarks.gpu_learner", "benchmarks.rank_step"
COMMANDS: dict[str, tuple[str, ...]] = {
    "like prime-rl": (_LEARNER, "--like", "prime-rl", "--compile", "--profile"),
    "packs of sequences": (_LEARNER, "--compile", "--profile"),
    "models": (_STEP, "0.6b", "1.7b", "4b"),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU")
    given = parser.parse_args(words)
    until = time.monotonic() + given.limit
    found: dict[str, Any] = {}
    for name, (module, *options) in COMMANDS.items():
        if given.tiny and module != _LEARNER:
            continue
        command = (module, *options, *(("--tiny",) if given.tiny else ()))
        print(f"## {' '.join(command)}", flush=True)
        found[name] = run_benchmark(command, until - time.monotonic())
    print(json.dumps(found))


def run_benchmark(command: Sequence[str], limit_s: float) -> Any:
    """Return a benchmark's figures, and print the lines before them."""
    if limit_s <= 0:
        return {"failed": "no time was left"}
    try:
        done = subprocess.run(
            (sys.executable, "-m", *command),
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than the {limit_s:.0f} s that were left"}
    *shown, last = done.stdout.splitlines() or [""]
    print("\n".join(shown), flush=True)
    try:
        return json.loads(last)
    except ValueError:
        return {"failed": f"ended with exit code {done.returncode}: {last}"}


if __name__ == "__main__":
    main()
