"""From an MCP server to a table: `flotilla init` and `flotilla init --train` on public servers.

    python -m benchmarks.own_tools                       # filesystem with seeds 0 to 2
    python -m benchmarks.own_tools --servers memory sqlite --seeds 0

Needs `make test-mcp`'s servers. Each server and seed has a folder below `--work`, and a line of
`--out` once it is done, so that a second call resumes. `time` only reads: what `init` says of it is
printed. The last line is one JSON object with all lines: the rates of held-out tasks by phase, and
wall and CPU seconds of making the tasks and of training."""

import argparse
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flotilla_common.process.python_command import python_command
from tests.mcp_servers.public_servers import SERVERS

_FLOTILLA = python_command("-m", "flotilla_launcher.cli.app")
READS_ONLY = "time"
_PHASES = ("base", "after the warm start", "after GRPO")


def main() -> None:
    given = _parse_arguments()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = _read_lines(given.out)
    for server in given.servers:
        for seed in given.seeds:
            if (server, seed) not in done:
                entry = measure_server(server, seed, given.tasks, given.work)
                done[server, seed] = entry
                # What failed is tried again by the next call. Where nothing can be made, it is an
                # answer.
                if "rows" in entry or server == READS_ONLY:
                    with given.out.open("a") as file:
                        file.write(json.dumps(entry) + "\n")
    chosen = [done[server, seed] for server in given.servers for seed in given.seeds]
    print("| server, seed | base | after the warm start | after GRPO | wall | CPU |")
    print("|---|---|---|---|---|---|")
    print("\n".join(map(_format_row, chosen)))
    print(json.dumps({"cores": os.cpu_count(), "rows": chosen}))


def measure_server(name: str, seed: int, tasks: int, work: Path) -> dict[str, Any]:
    """Make the folder of a server, train in it, and return what both took and what came of it."""
    folder = work / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = [str(folder), *_server_words(name, work), "--tasks", str(tasks), "--seed", str(seed)]
    phases = {"init": _run(["init", *words])}
    result: dict[str, Any] = {}
    if phases["init"]["code"] == 0:
        phases["train"] = _run(["init", str(folder), "--train", "--seed", str(seed)])
        result = json.loads((folder / "laptop.json").read_text())
        summary = folder / "runs" / result["run"] / "summary.json"
        result["run_seconds"] = json.loads(summary.read_text())["seconds"]
    return {"server": name, "seed": seed, "phases": phases, **result}


def _server_words(name: str, work: Path) -> list[str]:
    """Return the options of `flotilla init` for a public server, whose state is filled."""
    server = SERVERS[name]
    words = ["--mcp", " ".join(server.command)]
    for variable, value in server.env.items():
        words += ["--env", f"{variable}={value}"]
    for tool in server.read_only_tools:
        words += ["--read-only", tool]
    if server.fill is not None:
        state = work / f"state-{name}"
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        server.fill(state)
        words += ["--state", str(state)]
    return words


def _run(words: Sequence[str]) -> dict[str, Any]:
    """Run a command of ours; return its exit code, wall and CPU seconds of it and all below it."""
    before, started = _child_cpu(), time.monotonic()
    done = subprocess.run([*_FLOTILLA, *words], check=False)
    wall, cpu = time.monotonic() - started, _child_cpu() - before
    return {"code": done.returncode, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}


def _child_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_lines(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["server"], row["seed"]): row for row in map(json.loads, lines)}


def _format_row(entry: dict[str, Any]) -> str:
    spent = [
        entry["phases"].get(each) or {"wall_s": 0.0, "cpu_s": 0.0} for each in ("init", "train")
    ]
    wall, cpu = (sum(each[kind] for each in spent) for kind in ("wall_s", "cpu_s"))
    shown = [_format_rate(entry.get("rows", {}).get(phase)) for phase in _PHASES]
    cells = (f"{entry['server']}, {entry['seed']}", *shown, f"{wall:,.0f} s", f"{cpu:,.0f} s")
    return f"| {' | '.join(cells)} |"


def _format_rate(row: dict[str, Any] | None) -> str:
    if not row or not row["heldout"]:
        return "-"
    mean, low, high = (100 * row["heldout"][key] for key in ("mean", "low", "high"))
    greedy = row["greedy"] and f", greedily {100 * row['greedy']['mean']:.1f} %"
    return f"{mean:.1f} % [{low:.1f}, {high:.1f}]{greedy or ''}"


def _parse_arguments() -> argparse.Namespace:
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.own_tools", description=text)
    parser.add_argument("--servers", nargs="+", choices=[*SERVERS], default=["filesystem"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--tasks", type=int, default=40, help="to train on (40)")
    work, out = Path("build/own-tools"), Path("build/own-tools.jsonl")
    parser.add_argument("--work", type=Path, default=work, help=f"folder of the folders ({work})")
    parser.add_argument("--out", type=Path, default=out, help=f"where results are kept ({out})")
    return parser.parse_args()


if __name__ == "__main__":
    main()
