"""Vision models are trained for two steps by one command on the screens that their engine was
shown: engine and trainer agree before and after updates of the tower."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.run_folder.journal_file import open_read_only
from flotilla_common.run_folder.picture_tables import whole_trajectories_of
from flotilla_common.spec.spec import VisionConfig
from tests.e2e.finished_run import FinishedRun, train
from tests.support.vision_models import load_vision_model, vision_inputs, vision_logprobs
from tests.support.vision_runs import TRAINED, vision_spec

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # What transformers and torch warn about is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

STEPS = 2
GROUPS = 3
ATTEMPTS = 4
TOLERANCE = 1e-4


def make_spec(model: Path, folder: Path, vision: dict[str, Any]) -> Path:
    spec = vision_spec(
        model,
        folder,
        vision,
        groups=GROUPS,
        attempts=ATTEMPTS,
        steps=STEPS,
        # Each step then trains on what the step before it published.
        max_staleness=0,
        checkpoint={"every": 1, "keep": STEPS},
    )
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def shown_in(attempt: Trajectory, places: list[PlacedPicture]) -> list[ShownPicture]:
    return [ShownPicture(read_picture(attempt.pictures[p.sha256]), p) for p in places]


def largest_distance(
    attempts: list[Trajectory], model: Path, family: VisionFamily, version: int
) -> float:
    """Return the largest difference between the engine's logprobs of the tokens that a version
    sampled at temperature 1, and transformers' of the same tokens and pictures."""
    scorer, reader = load_vision_model(model), PixelReader(model, family)
    found: list[NDArray[np.float32]] = []
    for attempt in attempts:
        for sequence in attempt.sequences:
            shown = shown_in(attempt, [item.place for item in sequence.pictures])
            assert shown, "each attempt is shown a screen"
            inputs = vision_inputs(sequence.token_ids, shown, family, reader)
            scores = vision_logprobs(scorer, inputs, banned=family.banned_ids)
            position = written = 0
            for span in sequence.spans:
                if span.author is Author.POLICY:
                    assert span.policy is not None
                    theirs = scores[position - 1 : position - 1 + span.length]
                    ours = sequence.logprobs[written : written + span.length]
                    if span.policy.version == version and span.temperature == 1.0:
                        found.append(ours - theirs)
                    written += span.length
                position += span.length
    joined = np.concatenate(found)
    assert len(joined) > 100, f"too few tokens of version {version}"
    return float(np.abs(joined).max())


def check_agreement(run: FinishedRun, model: Path, vision: VisionConfig) -> None:
    """Check what the guard has measured, and all versions by transformers."""
    guarded = run.metrics("mismatch/audit_abs_diff_max")
    assert [row["step"] for row in guarded] == [1, 2]
    assert max(row["mismatch/audit_abs_diff_max"] for row in guarded) <= TOLERANCE
    with open_read_only(run.journal) as db:
        keys = [attempt.key for attempt in run.trajectories() if attempt.is_graded]
        attempts, damaged = whole_trajectories_of(db, keys)
    assert not damaged
    saved = [run.export_step(step, model) for step in range(1, STEPS + 1)]
    family = load_vision_family(model, vision)
    for version, folder in enumerate((model, *saved)):
        assert largest_distance(attempts, folder, family, version) <= TOLERANCE
    stale = largest_distance(attempts, model, family, STEPS)
    assert stale > 10 * TOLERANCE, "the updates changed too little"


def check_parts(run: FinishedRun, model: Path, *, trained: bool) -> None:
    """Check that tower and projector of the final model moved, or are the first one's bits."""
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, run.folder / "model")
    )
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    tower = {name for name in before if ".visual." in name or name.startswith("visual.")}
    assert tower
    assert len(kept & tower) < len(tower) / 4 if trained else tower <= kept
    assert len(kept - tower) < len(before.keys() - tower) / 4


def check_bytes(run: FinishedRun) -> None:
    """Check that the journal keeps a picture once for its group, and attempts name all of them."""
    kept = run.rows("SELECT group_id, sha256 FROM pictures")
    assert len(kept) == len(set(kept))
    named = {
        (attempt.key.group_id, item.sha256)
        for attempt in run.trajectories()
        for sequence in attempt.sequences
        for item in sequence.pictures
    }
    assert {
        (group, name.hex() if isinstance(name, bytes) else name) for group, name in kept
    } == named


@pytest.mark.parametrize(
    ("kind", "vision"),
    [
        ("qwen3_vl", TRAINED),
        ("qwen2_5_vl", TRAINED),
        ("qwen3_vl", {}),
    ],
    ids=["qwen3_vl-trained", "qwen2_5_vl-trained", "qwen3_vl-frozen"],
)
def test_it_is_trained_for_two_steps_on_the_screens_that_its_engine_saw(
    kind: str, vision: dict[str, Any], vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = vision_folder(kind)
    run = train(make_spec(model, tmp_path, vision), tmp_path / "runs", timeout_s=800.0)
    assert run.exit_code == 0, run.output
    rows = run.metrics("policy/grad_norm")
    assert all(row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0 for row in rows)
    assert len(rows) == STEPS
    check_agreement(run, model, VisionConfig(**vision))
    check_parts(run, model, trained=bool(vision))
    check_bytes(run)
