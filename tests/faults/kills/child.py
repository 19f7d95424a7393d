"""The killed process: a whole learner with `SmallRanks`, forked from `zygote`."""

import asyncio
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.run_folder.picture_tables import whole_trajectories_of
from flotilla_common.spec.spec import PolicyConfig, VisionConfig
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.app import run_learner
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.journal.plan_tables import plans_after
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from tests.faults.killer import Killer
from tests.faults.kills.ranks import SmallRanks
from tests.support.checkpoints import save_ranks
from tests.support.learner import TOKENIZER, make_config, make_runtime
from tests.support.rank_configs import policy_config

GO = "go"


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a learner: in which folder, for how many steps (0: it trains none), and which
    death it dies."""

    folder: Path
    model: Path
    port: int
    steps: int
    checkpoint_every: int = 2
    # It kills itself the `count`-th time that the ranks reach this moment.
    moment: str = ""
    count: int = 1
    # If true it first waits until a test opens this pipe.
    wait: bool = False


async def live(life: Life) -> None:
    """Serve and train until the run is done."""
    config = make_config(
        life.folder,
        steps=max(1, life.steps),
        groups_per_step=2,
        group_size=2,
        max_staleness=1,
        lease_ttl_s=0.4,
        attach_grace_s=0.1,
        checkpoint={"every": life.checkpoint_every, "keep": 2},
    )
    # No spec may have 0 steps: such a life ends as soon as its journal is made.
    config = config.model_copy(update={"steps": life.steps})
    runtime = make_runtime(life.folder, config, listen=f"127.0.0.1:{life.port}")
    ranks = SmallRanks(
        life.folder / "weights", _policy(life.model), Killer(life.moment, life.count)
    )
    tracker = JsonlTracker(life.folder / "run" / "metrics.jsonl")
    vendors = LearnerDependencies(
        *(ranks, tracker, TokenizerDigests(TOKENIZER)), vision=family_of(life.model)
    )
    await run_learner(runtime, vendors)
    tracker.close()


async def replay(folder: Path, model: Path) -> None:
    """Train on all plans of a finished run in one go; the checkpoint goes to `folder`/replayed."""
    copy = folder / "copy"
    copy.mkdir()
    with (
        closing(sqlite3.connect(folder / "run" / JOURNAL_FILE)) as source,
        closing(sqlite3.connect(copy / JOURNAL_FILE)) as target,
    ):
        source.backup(target)
        restore_payloads(target)
    ranks = SmallRanks(folder / "again", _policy(model))
    with open_read_only(copy / JOURNAL_FILE) as db:
        await ranks.start_ranks(None)
        for plan in plans_after(db, 0):
            attempts, damaged = whole_trajectories_of(db, plan.attempts)
            assert not damaged
            await ranks.train_step(build_train_batch(plan.step, attempts, plan.settings))
        await save_ranks(ranks, folder / "replayed")


def keep_payloads(run_dir: Path) -> None:
    """Have whatever the journal prunes laid aside in the same transaction."""
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        db.executescript(
            "CREATE TABLE attic (group_id, attempt_index, try, payload);"
            "CREATE TRIGGER keep BEFORE UPDATE OF payload ON trajectories"
            " WHEN new.payload IS NULL AND old.payload NOT NULL BEGIN INSERT INTO attic"
            " VALUES (old.group_id, old.attempt_index, old.try, old.payload); END;"
            "CREATE TABLE gallery (group_id, sha256, grid, data);"
            "CREATE TRIGGER keep_pictures BEFORE DELETE ON pictures BEGIN INSERT INTO gallery"
            " VALUES (old.group_id, old.sha256, old.grid, old.data); END;"
        )


def restore_payloads(db: sqlite3.Connection) -> None:
    """Bring back what `keep_payloads` laid aside."""
    db.execute(
        "UPDATE trajectories SET payload = attic.payload FROM attic"
        " WHERE trajectories.group_id = attic.group_id AND trajectories.try = attic.try"
        " AND trajectories.attempt_index = attic.attempt_index"
    )
    db.execute("INSERT INTO pictures SELECT * FROM gallery")
    db.commit()


def family_of(model: Path) -> VisionFamily | None:
    """Return how a model reads pictures, if it does."""
    sees = (model / "preprocessor_config.json").exists()
    return load_vision_family(model, VisionConfig()) if sees else None


def _policy(model: Path) -> PolicyConfig:
    vision = {"tower": "trained", "projector": "trained"} if family_of(model) else None
    return policy_config(model, vision=vision)


def run_life(life: Life) -> None:
    """Live one life, in the forked process."""
    if life.wait:
        os.close(os.open(life.folder / GO, os.O_RDONLY))
    asyncio.run(live(life))
