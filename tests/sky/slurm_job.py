"""A job of `deploy/slurm/run.sbatch` on a box of its own, as Slurm and its files show it."""

import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from tests.faults import harness
from tests.sky.box import Box, Layout
from tests.sky.box.layout import LOGIN, ROOT, SERVICES_PYTHON
from tests.sky.box.namespaces import processes_in
from tests.sky.whole_run import services_of
from tests.support.waiting import wait_until

NODES = Layout(
    base=Path("/var/tmp/flotilla-job"),
    user="flotilla-job",
    prefix="flojob",
    network="10.90.0",
    gpu_nodes=0,
    cpu_nodes=3,
    runtimes=False,
)
_LIMIT_S = 240.0


def make_materials(folder: Path) -> Path:
    """A small policy and its tasks, which all nodes can read."""
    command = (str(SERVICES_PYTHON), "-m", "tests.sky.materials", str(folder))
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=120)
    return folder


class SlurmJob:
    """One submitted job with one run."""

    def __init__(self, box: Box, made: Path, folder: Path, wish: dict[str, Any]) -> None:
        self._box = box
        self._made = made
        self._folder = folder
        self._spec = folder / "spec.json"
        self._spec.write_text(json.dumps(wish))
        self.job_id = ""

    def submit(self, *options: str, overrides: tuple[str, ...] = (), **variables: str) -> None:
        command = (
            *("sbatch", "--parsable", "--exclusive", f"--output={self._folder}/job.out"),
            *("--open-mode=append", *options),
            *("deploy/slurm/run.sbatch", str(self._spec), *overrides),
        )
        environment = {
            **os.environ,
            "RUNS": str(self.runs),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}",
            "FLOTILLA_TEST_TASKS": str(self._made / "tasks.json"),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        done = subprocess.run(
            self._box.command(LOGIN, *command),
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.job_id = done.stdout.strip()

    @property
    def runs(self) -> Path:
        return self._folder / "runs"

    @property
    def run_dir(self) -> Path:
        [found] = [path.parent for path in self.runs.glob("*/spec.json")]
        return found

    def state(self) -> str:
        """The job's state in Slurm's words; empty when Slurm has forgotten it."""
        return self._field("JobState")

    def exit_code(self) -> str:
        return self._field("ExitCode")

    def first_node(self) -> str:
        return self._field("BatchHost")

    def _field(self, name: str) -> str:
        reported = self._box.slurm("scontrol", "show", "job", self.job_id, check=False)
        found = (word.partition("=") for word in reported.split())
        return next((value for key, _, value in found if key == name), "")

    def steps(self) -> int:
        """Steps whose plans are committed."""
        journals = list(self.runs.glob(f"*/{JOURNAL_FILE}"))
        if not journals:
            return 0
        with closing(sqlite3.connect(f"file:{journals[0]}?mode=ro", uri=True)) as db:
            try:
                return max(
                    (int(step) for (step,) in db.execute("SELECT step FROM plans")), default=0
                )
            except sqlite3.OperationalError:
                # The learner is just making its tables.
                return 0

    def working(self) -> dict[str, list[str]]:
        """Return, by node, the services that run there."""
        layout = self._box.layout
        found = {node: services_of(processes_in([layout.namespace(node)])) for node in layout.nodes}
        return {node: services for node, services in found.items() if services}

    def command_lines(self) -> str:
        """Everything that users of the nodes can read of the job."""
        pids = processes_in(map(self._box.layout.namespace, self._box.layout.nodes))
        return "\n".join(Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace") for pid in pids)

    def until(self, reached: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
        wait_until(reached, limit_s, self.explained)

    def explained(self) -> str:
        files = [self._folder / "job.out", *self.runs.glob("*/logs/*.log")]
        return "\n".join(f"{f.name}: {f.read_text()[-3000:]}" for f in files if f.exists())


def spec(made: Path, **learner: Any) -> dict[str, Any]:
    """A run of a second a step, all of it real but the engine's model."""
    wish = harness.spec(made / "policy", made / "tasks.json", lease_ttl_s=30.0, **learner)
    del wish["learner"]["eval"]
    # All nodes have the same two cores.
    wish["rollout"]["max_attempts"] = 4
    wish["launcher"] |= {"drain_s": 60.0}
    return wish
