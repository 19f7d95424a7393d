"""Real runs, made to suffer: every process of a run but the engine's model is the real thing."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_common.weights.shared_memory import SHARED_MEMORY
from flotilla_environments.task_generator import APPS
from flotilla_environments.tasks import make_tasks
from flotilla_launcher.security import launcher_address
from flotilla_learner.journal.row_codec import count_fates
from tests.support.launcher import left_running, start_cli
from tests.support.waiting import until

# A busy machine takes ten times as long as an idle one.
LIMIT_S = 120.0
LAUNCHER = "flotilla_launcher"
GATEWAY = "flotilla_env_gateway"
ENVIRONMENTS = "flotilla_environments.serve"
LEARNER = "flotilla_learner"
RANK = "flotilla_learner.rank"
WEIGHTS = "flotilla_learner.weights.weight_server"
VLLM_ROLLOUT = "flotilla_rollout"
TASKS = 60
# What vLLM calls the process that holds the model.
ENGINE = "VLLM::EngineCore"
ROLLOUT = "tests.faults.rollout_with_small_engine"

# A launcher's times with which it soon starts what has ended.
NOTICE_SOON = {"backoff_s": 0.05, "heartbeat_interval_s": 0.1, "drain_s": 10.0}
HELDOUT = "heldout.json"
EMBEDDED = {"backend": "embedded"}
MCP = {
    "backend": "mcp",
    "servers": [{"command": ["python", "-m", ENVIRONMENTS], "instances": True}],
}


def write_tasks(folder: Path) -> Path:
    """Tasks that `SmallEngine` can distinguish; those in `HELDOUT` next to them are evaluated."""
    path = folder / "tasks.json"
    made = list(make_tasks(list(APPS), "train", TASKS))
    heldout = list(make_tasks(list(APPS), "heldout", 2))
    prompts = {task["prompt"] for task in (*made, *heldout)}
    assert len(prompts) == TASKS + 2, "the engine knows tasks by prompts"
    path.write_text(json.dumps({"tasks": made}))
    path.with_name(HELDOUT).write_text(json.dumps({"tasks": heldout}))
    return path


def spec(policy: Path, tasks: Path, **learner: Any) -> dict[str, Any]:
    """A run of one second a step that quickly notices the end of its processes."""
    return {
        "name": "faults",
        "policy": {"model": str(policy), "dtype": "float32", "max_model_len": 512},
        "env_gateway": {**EMBEDDED, "lease_ttl_s": 5.0, "verifiers": {"workers": 1}},
        "rollout": {
            "max_attempts": 8,
            "max_turns": 6,
            "max_input_length": 440,
            "max_generate_length": 64,
            "retry_pause_s": 0.05,
            "dialect": {"name": "template"},
            "engine": {"kind": "fake", "device": "cpu"},
        },
        "learner": {
            "tasks": str(tasks),
            "steps": 6,
            "groups_per_step": 2,
            "group_size": 4,
            "lease_ttl_s": 3.0,
            "attach_grace_s": 0.5,
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 2},
            "eval": {"sets": [{"name": "heldout", "tasks": str(tasks.with_name(HELDOUT))}]},
            **learner,
        },
        "launcher": {"modules": {"rollout": ROLLOUT}, **NOTICE_SOON},
    }


class FaultRun:
    """One run of `flotilla train`, or another command that trains, in a folder of its own, and the
    contents of its journal."""

    def __init__(self, folder: Path, wish: dict[str, Any]) -> None:
        self.runs = folder / "runs"
        self.path = folder / "spec.json"
        self.path.write_text(json.dumps(wish))
        self.output = ""
        # How long anything may take.
        self.limit_s = LIMIT_S
        self._engines: list[psutil.Process] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def train(self, *arguments: str, command: str = "train") -> None:
        """Start the command; what it prints is collected in `output`."""
        words = (command, str(self.path), *arguments, "--runs", str(self.runs))
        self.output = ""
        self._process = await start_cli(*words)
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while text := await process.stdout.read(4096):
            self.output += text.decode()

    def interrupt(self) -> None:
        """Ctrl-C."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    async def exit(self, limit_s: float | None = None) -> int:
        """The exit code of `flotilla train`, once it has ended."""
        assert self._process is not None and self._reading is not None
        limit_s = limit_s or self.limit_s
        try:
            code = await asyncio.wait_for(self._process.wait(), limit_s)
        except TimeoutError:
            raise AssertionError(f"not over after {limit_s} s:\n{self.state()}") from None
        await self._reading
        return code

    async def completes(self) -> None:
        code = await self.exit()
        assert code == 0, self.state()

    @property
    def folder(self) -> Path:
        """The run's folder, which there is one of."""
        [found] = [path.parent for path in self.runs.glob("faults-*/spec.json")]
        return found

    def state(self) -> str:
        """Everything that explains how it came to this."""
        logs = [f"{path.name}: {path.read_text()[-3000:]}" for path in self.runs.glob("*/logs/*")]
        return "\n".join([self.output, *logs])

    def begun(self) -> bool:
        return bool(list(self.runs.glob(f"faults-*/{JOURNAL_FILE}")))

    def query(self, sql: str) -> list[Any]:
        """Rows of the journal; none before there is one."""
        if not self.begun():
            return []
        with sqlite3.connect(f"file:{self.folder / JOURNAL_FILE}?mode=ro", uri=True) as db:
            try:
                return db.execute(sql).fetchall()
            except sqlite3.OperationalError:
                # The learner is just making its tables.
                return []

    def steps(self) -> int:
        """Steps whose plans are committed."""
        return max((step for (step,) in self.query("SELECT step FROM plans")), default=0)

    def sampled(self) -> int:
        """Trajectories that the learner has acknowledged."""
        return len(self.query("SELECT 1 FROM trajectories"))

    async def until(self, reached: Callable[[], bool]) -> None:
        def has_reached() -> bool:
            if reached():
                return True
            assert self._process is not None and self._process.returncode is None, self.state()
            return False

        await until(has_reached, self.limit_s, self.state)

    async def step(self, number: int) -> None:
        """Wait until the plan of this step is committed."""
        await self.until(lambda: self.steps() >= number)

    def processes(self, module: str) -> list[psutil.Process]:
        """The run's processes that were started with `-m MODULE`, or are ENGINE."""
        running = left_running(self.runs)
        if module != ENGINE:
            return [p for p in running if module in _words(p)]
        # It has written over its environment, by which the others are found.
        found = [c for p in running for c in _children(p) if ENGINE in _words(c)]
        self._engines += found
        return found

    def kill(self, *modules: str) -> None:
        """`kill -9` of these, and of nothing else. Each must be running."""
        found = {module: self.processes(module) for module in modules}
        for module, victims in found.items():
            assert victims, f"{module} is not running\n{self.state()}"
        for victim in (process for victims in found.values() for process in victims):
            # Some end by themselves when those before them do.
            with suppress(psutil.NoSuchProcess):
                victim.kill()

    def kill_command(self) -> None:
        assert self._process is not None
        self._process.kill()

    def kill_launcher(self) -> None:
        address = launcher_address.read_address(self.runs)
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)

    async def restarted(self, module: str, before: Collection[psutil.Process]) -> None:
        """Wait until another process of this module runs than those before."""
        await self.until(lambda: any(p not in before for p in self.processes(module)))

    async def gone(self, limit_s: float) -> None:
        """No process of the run is left, and nothing in shared memory."""
        deadline = time.monotonic() + limit_s
        while left := [*left_running(self.runs), *filter(runs, self._engines)]:
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            await asyncio.sleep(0.05)
        self.check_shared_memory()

    async def check_end(self, steps: int) -> None:
        """The whole run is accounted for, and nothing of it is left behind."""
        await self.gone(5.0)
        self.check_books(steps)
        with sqlite3.connect(self.folder / JOURNAL_FILE) as db:
            fates = count_fates(db)
        summary = json.loads((self.folder / "summary.json").read_text())
        assert summary["steps"] == steps
        assert fates["trained"] >= steps, fates
        assert fates["evaluated"] == 4, "two tasks before and two after"

    def clear_shared_memory(self) -> None:
        for run in self.runs.glob("faults-*"):
            for path in SHARED_MEMORY.glob(f"*{run.name}*"):
                shutil.rmtree(path)

    def check_shared_memory(self) -> None:
        for run in self.runs.glob("faults-*"):
            assert not list(SHARED_MEMORY.glob(f"*{run.name}*")), "left in shared memory"

    def check_books(self, steps: int | None = None) -> None:
        """I1 and I2 of the journal, and I3 of the gateway's."""
        with sqlite3.connect(self.folder / JOURNAL_FILE) as db:
            fates = count_fates(db)
            planned = db.execute(
                "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]')"
                " FROM plans, json_each(plans.attempts)"
            ).fetchall()
            graded = db.execute(
                "SELECT group_id, attempt_index FROM trajectories WHERE failure IS NULL"
            ).fetchall()
        assert len(set(planned)) == len(planned), "an attempt is in two steps"
        assert set(planned) <= set(graded), "a step was planned with attempts that were not sent"
        acknowledged = fates.pop("acknowledged")
        assert sum(fates.values()) == acknowledged, fates
        assert steps is None or self.steps() == steps
        for journal in self.folder.glob("env_gateway-*.sqlite"):
            with sqlite3.connect(journal) as db:
                assert not db.execute("SELECT * FROM instances").fetchall(), "leaked instances"

    async def end(self) -> None:
        """Whatever the test came to, nothing of it stays."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self.processes(ENGINE)
        for process in [*left_running(self.runs), *filter(runs, self._engines)]:
            process.kill()
        self.clear_shared_memory()

    def keep_payloads(self) -> None:
        """Have the journal refuse to prune, so that all of its plans can be replayed."""
        with sqlite3.connect(self.folder / JOURNAL_FILE, timeout=10.0) as db:
            db.execute(
                "CREATE TRIGGER IF NOT EXISTS keep BEFORE UPDATE OF payload ON trajectories"
                " BEGIN SELECT RAISE(IGNORE); END"
            )


def runs(process: psutil.Process) -> bool:
    """Return whether it is there and not merely waiting to be noticed as dead."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
