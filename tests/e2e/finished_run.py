"""A run of the `flotilla` command with every real part, and what it left behind."""

import json
import os
import sqlite3
import subprocess
import sys
import tomllib
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Sequence, Trajectory
from flotilla_common.run_folder.journal_file import open_read_only
from flotilla_common.run_folder.trajectory_tables import keys_of, trajectory_of
from flotilla_common.spec.spec import PolicyConfig
from flotilla_environments.api import ENV_KEYS
from flotilla_environments.task_generator import Split
from flotilla_environments.tasks import make_tasks
from flotilla_learner.checkpoints.export import export_model
from tests.support.repository import ROOT

EVAL_TASKS = 3
GROUPS = 6


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended: its files, and how the command ended."""

    runs: Path
    exit_code: int
    output: str

    @property
    def folder(self) -> Path:
        [found] = (path for path in self.runs.glob("[!.]*") if path.is_dir())
        return found

    @property
    def journal(self) -> Path:
        return self.folder / "journal.sqlite"

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def export_step(self, step: int, model: Path) -> Path:
        """Return a folder with the model of a step's checkpoint, in float32; `model` is the one
        that the run began with."""
        out = self.runs / f".exported-{step}"
        policy = PolicyConfig(model=str(model), dtype="float32", max_model_len=1)
        export_model(self.folder / f"checkpoints/step-{step:06d}", model, policy, out)
        return out

    def rows(self, query: str, file: str = "journal.sqlite") -> list[tuple[Any, ...]]:
        """Return what a query finds in one of the run's SQLite files."""
        path = self.folder / file
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Return the records of metrics that have one of this name."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if name in record]

    def trajectories(self, where: str = "1") -> list[Trajectory]:
        """Trajectories of the groups that `where` chooses."""
        groups = self.rows(f"SELECT group_id FROM groups WHERE {where} ORDER BY group_id")
        with open_read_only(self.journal) as db:
            keys = [key for (group,) in groups for key in keys_of(db, group)]
            return [trajectory_of(db, key) for key in keys]


def write_spec(folder: Path, policy: Path, *, steps: int) -> Path:
    """The demo's spec for another policy, with few tasks and a checkpoint of every step."""
    spec = tomllib.loads((ROOT / "deploy/runs/local.toml").read_text())
    del spec["prepare"]
    spec["policy"]["model"] = str(policy)
    learner = spec["learner"]
    # Strictly on policy: each step then trains on what the step before it published.
    learner |= {"steps": steps, "max_staleness": 0, "tasks": _tasks(folder, "train", 48)}
    learner["groups_per_step"] = GROUPS
    learner["checkpoint"] = {"every": 1, "keep": steps}
    for chosen in learner["eval"]["sets"]:
        split: Split = "unseen_names" if chosen["name"] == "unseen_names" else "heldout"
        chosen["tasks"] = _tasks(folder, split, EVAL_TASKS)
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def _tasks(folder: Path, split: Split, count: int) -> str:
    path = folder / f"{split}.json"
    path.write_text(json.dumps({"tasks": list(make_tasks(ENV_KEYS, split, count))}))
    return str(path)


def train(spec: Path, runs: Path, *overrides: str, timeout_s: float) -> FinishedRun:
    """`flotilla train`, to its end."""
    command = [sys.executable, "-m", "flotilla_launcher.cli.app", "train", str(spec)]
    done = subprocess.run(
        [*command, "--runs", str(runs), *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return FinishedRun(runs, done.returncode, done.stdout)


def processes_of(runs: Path) -> list[str]:
    """Command lines of processes with this runs folder as an argument or in their environment.

    Everything that a launcher starts inherits its mark, which names the folder.
    """
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            message = " ".join([*process.cmdline(), *process.environ().values()])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if str(runs) in message and process.pid != os.getpid():
            found.append(" ".join(process.cmdline()))
    return found


class Scorer:
    """A model folder of the Hugging Face layout that scores tokens, by transformers alone."""

    def __init__(self, folder: Path) -> None:
        multimodal = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        self._model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def logprobs(
        self, token_ids: NDArray[np.int32], places: NDArray[np.int64], temperature: float
    ) -> NDArray[np.float32]:
        """Return the logprobs of the tokens at `places`, given those before them."""
        ids = torch.tensor(token_ids.tolist())
        # Of a large vocabulary, logits of all positions would take longer than all else.
        kept = torch.from_numpy(places)
        logits = self._model(ids[None], use_cache=False, logits_to_keep=kept - 1).logits[0]
        scaled = logits / temperature
        # `log_softmax` rounds away the unlikely tokens of a large vocabulary.
        picked = scaled.gather(-1, ids[kept, None])[:, 0] - scaled.logsumexp(-1)
        return picked.numpy()


def distances(sequence: Sequence, scorer: Scorer, version: int) -> NDArray[np.float32]:
    """Engine's minus trainer's logprob of every token that `version` wrote."""
    engine: dict[float, list[NDArray[np.float32]]] = defaultdict(list)
    places: dict[float, list[NDArray[np.int64]]] = defaultdict(list)
    position = written = 0
    for span in sequence.spans:
        if span.author is Author.POLICY and span.policy is not None:
            if span.policy.version == version:
                # Greedy tokens are reported at temperature 1.
                temperature = span.temperature or 1.0
                engine[temperature].append(sequence.logprobs[written : written + span.length])
                places[temperature].append(np.arange(position, position + span.length))
            written += span.length
        position += span.length
    found = [
        np.concatenate(engine[temperature])
        - scorer.logprobs(sequence.token_ids, np.concatenate(where), temperature)
        for temperature, where in places.items()
    ]
    return np.concatenate(found) if found else np.zeros(0, np.float32)
