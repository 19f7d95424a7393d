"""The cookbook's recipes, run by their own command lines, and what each did."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT
from tests.support.waiting import wait_until
from tests.tinker.client.served import Served
from tests.tinker.client.stage import COUNTED_WORD, MODEL, TOOL_RENDERER

PYTHON = ROOT / "build/tinker-client/bin/python"
LIMIT_S = 900
_COOKBOOK = "tinker_cookbook.recipes."
_SMALL = ("batch_size=16", "group_size=8", "max_tokens=16")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe, and flags that make it small."""

    name: str
    module: str
    flags: Sequence[str]
    # The metric whose curve shows that it learns, and whether that rises or falls; None: too few
    # steps here to tell.
    metric: str = ""
    rises: bool | None = True
    # Part of the refusal that is expected instead.
    refused: str = ""
    # Ended after its first checkpoint and started again.
    interrupted: bool = False
    # Recipe whose last sampler is the teacher.
    teacher: str = ""
    # Why it does not run here; nothing of ours is asked.
    not_run: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """What a recipe did."""

    recipe: Recipe
    code: int
    # Values of the recipe's metric, a step each.
    curve: Sequence[float]
    output: str
    seconds: float

    @property
    def refusal(self) -> str:
        """The server's words, from the end of a traceback."""
        found = re.findall(r"'detail': (?:'(.*)'|\"(.*)\")}", self.output)
        last = self.output.strip().splitlines()[-1] if self.output.strip() else ""
        return "".join(found[-1]) if found else last

    @property
    def learned(self) -> bool:
        """Whether the last third of the curve is better than the first."""
        if self.recipe.rises is None:
            return True
        part = max(1, len(self.curve) // 3)
        first, last = sum(self.curve[:part]), sum(self.curve[-part:])
        return len(self.curve) > 2 and (last > first if self.recipe.rises else last < first)


_GSM8K = (
    "dataset_builder=Gsm8kDatasetBuilder",
    *(f"dataset_builder.{flag}" for flag in _SMALL[:2]),
    f"dataset_builder.model_name_for_tokenizer={MODEL}",
    "dataset_builder.renderer_name=role_colon",
    _SMALL[2],
)
_RL_BASIC = (*_GSM8K, "learning_rate=3e-3", "max_steps=12", "save_every=4")
_IS = "loss_fn=importance_sampling"
_RL_LOOP = (*_SMALL, "learning_rate=3e-3", "max_steps=12")
_REWARD = "env/all/reward/total"
_PAGES = tuple(f"task.num_pages_{end}=1" for end in ("min", "max"))
_READING = (*_PAGES, "task.page_chars=120", f"task.words={COUNTED_WORD}")

RECIPES = (
    Recipe("sl_basic", "sl_basic", ("learning_rate=3e-3",), "train_mean_nll", rises=False),
    Recipe("sl_loop", "sl_loop", ("learning_rate=3e-3",), "train_mean_nll", rises=False),
    Recipe("rl_basic", "rl_basic", _RL_BASIC, _REWARD),
    Recipe("rl_basic, resumed", "rl_basic", _RL_BASIC, _REWARD, interrupted=True),
    Recipe("rl_loop", "rl_loop", (*_RL_LOOP, _IS), "reward/total"),
    Recipe(
        "rl_loop, resumed",
        "rl_loop",
        (*_RL_LOOP, _IS, "save_every=4"),
        "reward/total",
        interrupted=True,
    ),
    Recipe("rl_loop, cispo", "rl_loop", (*_RL_LOOP, "loss_fn=cispo"), "reward/total"),
    Recipe("rl_loop, gspo", "rl_loop", (*_RL_LOOP, "loss_fn=gspo"), "reward/total"),
    Recipe("rl_loop, its default loss", "rl_loop", _RL_LOOP, refused=_IS),
    Recipe(
        "math_rl",
        "math_rl.train",
        (
            "env=gsm8k",
            "groups_per_batch=16",
            *_SMALL[1:],
            "learning_rate=3e-3",
            "max_steps=8",
            "loss_fn=ppo",
        ),
        _REWARD,
    ),
    Recipe(
        "preference.dpo",
        "preference.dpo.train",
        ("dataset=hhh", "batch_size=32", "learning_rate=1e-3", "max_steps=8"),
        "dpo_loss",
        rises=False,
    ),
    Recipe(
        "distillation.on_policy_distillation",
        "distillation.on_policy_distillation",
        (
            f"teacher_model={MODEL}",
            "groups_per_batch=16",
            "group_size=4",
            "max_tokens=16",
            "lora_rank=32",
            "learning_rate=3e-3",
            "max_steps=8",
        ),
        "teacher_kl",
        rises=False,
        teacher="rl_basic",
    ),
    Recipe(
        "rl_numerics_check (offers a tool; this model calls none)",
        "rl_numerics_check.train",
        (
            f"renderer_name={TOOL_RENDERER}",
            *_READING,
            "groups_per_batch=8",
            "group_size=8",
            "max_tokens=64",
            "max_trajectory_tokens=1500",
            "learning_rate=3e-3",
            "max_steps=8",
        ),
        _REWARD,
        rises=None,
    ),
    Recipe("search_tool", "search_tool.train", (), not_run="needs Chroma and a key of Gemini"),
)


def run_recipe(recipe: Recipe, served: Served, folder: Path) -> RecipeRun:
    """Run a recipe to its end; `folder` keeps its log, next to those of others."""
    log = folder / recipe.name
    command = [
        str(PYTHON),
        *("-m", f"{_COOKBOOK}{recipe.module}"),
        *(f"model_name={MODEL}", f"log_path={log}", *recipe.flags),
    ]
    if recipe.teacher:
        command.append(f"teacher_checkpoint={_last_sampler(folder / recipe.teacher)}")
    environment = served.environment | {"HF_HOME": str(folder / "huggingface")}
    start = time.monotonic()
    if recipe.interrupted:
        _interrupt(command, served, environment, log)
    done = subprocess.run(
        command,
        cwd=served.folder,
        env=environment,
        # What to do with the log of the interrupted run.
        input="resume\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    rows = read_rows(log / "metrics.jsonl")
    curve = [row[recipe.metric] for row in rows if recipe.metric in row]
    seconds = time.monotonic() - start
    return RecipeRun(recipe, done.returncode, curve, done.stdout + done.stderr, seconds)


def _interrupt(
    command: Sequence[str], served: Served, environment: dict[str, str], log: Path
) -> None:
    """Start a recipe and end it, as Ctrl-C does, after its first checkpoint."""
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command,
        cwd=served.folder,
        env=environment,
        stdout=null,
        stderr=null,
        start_new_session=True,
    ) as process:
        wait_until(lambda: bool(read_rows(log / "checkpoints.jsonl")), LIMIT_S)
        os.killpg(process.pid, signal.SIGINT)


def _last_sampler(log: Path) -> str:
    rows = read_rows(log / "checkpoints.jsonl")
    return next(row["sampler_path"] for row in reversed(rows) if "sampler_path" in row)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if it is not there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]
