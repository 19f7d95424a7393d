"""Builds the policy folder: cached by the digest of its inputs, written atomically."""

import fcntl
import hashlib
import json
import random
import tempfile
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from itertools import count
from pathlib import Path
from time import process_time

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from flotilla_environments.tiny_policy.courses import COURSES, Course
from flotilla_environments.tiny_policy.demonstrator import Habits
from flotilla_environments.tiny_policy.eyes import Eyes
from flotilla_environments.tiny_policy.model import Shape, build_model, save_model
from flotilla_environments.tiny_policy.tokenizer import (
    END_OF_TEXT,
    IMAGE_PAD,
    TURN_END,
    save_tokenizer,
    token_id,
    train_tokenizer,
)
from flotilla_environments.tiny_policy.train import Example, Model, Schedule, warm_start
from flotilla_environments.tiny_policy.vision_model import (
    Tower,
    build_vision_model,
    embed_by_product,
    save_processor,
)
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.template import TemplateDialect

MANIFEST = "tiny_policy.json"
# Code that determines the result; a change in any of it makes a cached build stale.
SOURCES = (
    "flotilla_environments/*.py",
    "flotilla_environments/*/app.py",
    "flotilla_environments/gsm8k/*.py",
    "flotilla_environments/screen/*.py",
    "flotilla_common/domain/task_text.py",
    "flotilla_common/episodes/conversations.py",
    "flotilla_common/images/*.py",
    "flotilla_reading/demonstrations/conversation_*.py",
    "flotilla_rollout/adapters/tokenizer.py",
    "flotilla_rollout/dialects/template.py",
    "flotilla_rollout/dialects/template_turns.py",
    *(
        f"flotilla_environments/tiny_policy/{module}.py"
        for module in (
            *("arithmetic", "build", "courses", "demonstrations", "demonstrator", "drills"),
            *("eyes", "induction", "model", "own_tools", "screens", "tokenizer", "train"),
            "vision_model",
        )
    ),
)
MAX_DISTINCT_SEEDS = 100_000
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")

Progress = Callable[[str, int, int], None]
"""Called with a stage, the number of items done and their total."""


@dataclass(frozen=True)
class Recipe:
    """Inputs that may vary between two builds of the same code."""

    seed: int = 0
    course: str = "tools"
    demonstrations: int = 8_000
    vocab_size: int = 2_000
    shape: Shape = field(default_factory=Shape)
    tower: Tower | None = None
    habits: Habits = field(default_factory=Habits)
    schedule: Schedule = field(default_factory=Schedule)
    # Trains on basic examples only, before `schedule` trains on all, or only on the others.
    basics: Schedule | None = None
    repeats_basics: bool = True
    # SHA-256 of the files that the course is made of, if it is of one's own tools.
    files: str = ""


def recipe_for(course: str, seed: int) -> Recipe:
    """Return the recipe of a course's policy. Arithmetic has many facts and short episodes."""
    if course == "arithmetic":
        return Recipe(seed, course, demonstrations=24_000, schedule=Schedule(1_500, 16))
    if course == "screen":
        return Recipe(
            seed,
            course,
            tower=Tower(),
            schedule=Schedule(800, 16, learning_rate=4e-3, weight_decay=0.0),
            # Which place has which colour is learnt all of a sudden, and later the more there is
            # to learn next to it.
            basics=Schedule(600, 32, learning_rate=4e-3, weight_decay=0.0),
        )
    return Recipe(seed, course)


class BuildError(Exception):
    """The folder cannot be built; the message states the fix."""


def build(
    out: Path,
    recipe: Recipe,
    progress: Progress = lambda stage, done, total: None,
    course: Course | None = None,
) -> bool:
    """Build the folder of `recipe` at `out`; return False if it is already up to date. A `course`
    takes the place of the one that the recipe names.

    Readers see the old folder or the new one, never a part. Waits while another process builds the
    same folder. Raises `BuildError` if `out` holds other files.
    """
    digest = recipe_digest(recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _hold_lock(out.with_name(f".{out.name}.lock")):
        if _is_built(out, digest):
            return False
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            fresh = Path(scratch) / "new"
            fresh.mkdir()
            _fill_folder(fresh, recipe, course or COURSES[recipe.course], digest, progress)
            if out.exists():
                out.rename(Path(scratch) / "old")
            fresh.rename(out)
    return True


def recipe_digest(recipe: Recipe) -> str:
    """Return the SHA-256 of the recipe, the sources in `SOURCES`, the versions in `LIBRARIES`."""
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for pattern in SOURCES:
        package, _, files = pattern.partition("/")
        folder = Path(next(iter(import_module(package).__path__)))
        for file in sorted(folder.glob(files)):
            name = f"{package}/{file.relative_to(folder)}"
            digest.update(f"\n{name}\n".encode() + file.read_bytes())
    for library in LIBRARIES:
        digest.update(f"\n{library} {version(library)}".encode())
    return digest.hexdigest()


def _is_built(out: Path, digest: str) -> bool:
    if not out.exists():
        return False
    manifest = out / MANIFEST
    if not manifest.is_file():
        raise BuildError(
            f"{out} exists and was not built by this command: remove it or choose another --out"
        )
    return bool(json.loads(manifest.read_text()).get("digest") == digest)


def _fill_folder(
    folder: Path, recipe: Recipe, course: Course, digest: str, progress: Progress
) -> None:
    """Train tokenizer and model, and write them with the manifest."""
    started = process_time()
    # More threads would change the order of additions, and so the bits of the result.
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    progress("tokenizer", 0, 1)
    sees = recipe.tower is not None
    tokenizer = train_tokenizer(course.vocabulary_texts(), recipe.vocab_size, vision=sees)
    progress("tokenizer", 1, 1)
    save_tokenizer(tokenizer, folder)
    model = _start_model(recipe, tokenizer)
    save_model(model, folder)
    if recipe.tower is not None:
        save_processor(recipe.tower, folder)
    eyes = Eyes(folder) if sees else None
    last_loss = _train_model(model, recipe, course, tokenizer, eyes, progress)
    save_model(model, folder)
    manifest = {
        "digest": digest,
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        **course.measures(TransformersTokenizer(tokenizer)),
        "last_loss": round(last_loss, 4),
        "cpu_seconds": round(process_time() - started, 1),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _start_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Model:
    if recipe.tower is not None:
        model = build_vision_model(recipe.shape, recipe.tower, tokenizer, seed=recipe.seed)
        embed_by_product(model)
        return model
    return build_model(
        recipe.shape,
        vocab_size=len(tokenizer),
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
        seed=recipe.seed,
    )


def _train_model(
    model: Model,
    recipe: Recipe,
    course: Course,
    tokenizer: PreTrainedTokenizerFast,
    eyes: Eyes | None,
    progress: Progress,
) -> float:
    """Warm-start the model; return the mean loss of its last 50 steps, in nats a token."""
    examples = _make_examples(recipe, course, TransformersTokenizer(tokenizer), eyes, progress)
    lessons = [(examples, recipe.schedule)]
    if recipe.basics is not None:
        last = [each for each in examples if recipe.repeats_basics or not each.basic]
        basic = [each for each in examples if each.basic]
        lessons = [(basic, recipe.basics), (last, recipe.schedule)]
    losses: deque[float] = deque(maxlen=50)
    steps, done = sum(schedule.steps for _, schedule in lessons), count(1)

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        progress("training", next(done), steps)

    for chosen, schedule in lessons:
        warm_start(
            model,
            chosen,
            schedule,
            pad_token_id=token_id(tokenizer, END_OF_TEXT),
            seed=recipe.seed,
            on_step=on_step,
            see=eyes.look if eyes else lambda batch, ids: {},
        )
    return sum(losses) / len(losses)


def _make_examples(
    recipe: Recipe,
    course: Course,
    tokenizer: TransformersTokenizer,
    eyes: Eyes | None,
    progress: Progress,
) -> list[Example]:
    dialect = TemplateDialect(tokenizer, pad=IMAGE_PAD if eyes else "")
    drawn = course.demonstrations(
        recipe.demonstrations,
        # Seeds share no task, within the range of indices of data ids.
        first=recipe.seed % MAX_DISTINCT_SEEDS * recipe.demonstrations,
        habits=recipe.habits,
        rng=random.Random(f"demonstrator/{recipe.seed}"),
    )
    examples: list[Example] = []
    for demonstration in drawn:
        example = course.tokenise(demonstration, dialect, tokenizer)
        examples.append(eyes.expand(example) if eyes else example)
        progress("demonstrations", len(examples), recipe.demonstrations)
    return examples


@contextmanager
def _hold_lock(path: Path) -> Generator[None]:
    """Hold an advisory lock that ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
