"""Ranks whose blocks torch compiles: they compute what one does that compiles nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from flotilla_learner.rank.block_compilation import CACHE_VARIABLE
from flotilla_learner.types import Publication, StepResult
from tests.learner.ranks.test_sharded_ranks import (
    TOLERANCE,
    assert_same,
    started,
    train,
    weights_of,
)
from tests.support.tiny_ranks import write_model

Found = tuple[list[StepResult], Publication, dict[str, np.ndarray]]
STEPS = range(1, 4)


async def trained_by(model: Path, folder: Path, processes: int, **changes: Any) -> Found:
    async with started(model, folder, processes, **changes) as ranks:
        results = await train(ranks, STEPS)
        publication = await ranks.publish_weights(STEPS[-1])
        return results, publication, weights_of(publication)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_that_hold_parts_make_the_same_steps_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    model = write_model(tmp_path / "model")
    alone, published, weights = await trained_by(model, tmp_path, 1)
    changes = {"compile": True, "algorithm": "everything"}
    whole, _, _ = await trained_by(model, tmp_path, 1, algorithm="everything")
    with capture_logs() as logs:
        several, others, shared = await trained_by(model, tmp_path, 2, compile=True)
        full, _, _ = await trained_by(model, tmp_path, 2, **changes)
    assert not [entry for entry in logs if entry["log_level"] != "info"]
    for ours, theirs in ((alone, several), (whole, full)):
        for one, other in zip(ours, theirs, strict=True):
            assert other.metrics["policy/uncompiled_blocks"] == 0
            for name in ("policy/loss", "policy/grad_norm", "policy/post_update_kl"):
                assert other.metrics[name] == pytest.approx(
                    one.metrics[name], rel=TOLERANCE, abs=TOLERANCE
                ), name
    assert_same(weights, shared)
    np.testing.assert_allclose(
        others.canary_logprobs, published.canary_logprobs, rtol=0, atol=TOLERANCE
    )


@pytest.mark.slow
async def test_one_without_a_compiler_warns_as_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = write_model(tmp_path / "model")
    with capture_logs() as logs:
        changes = {"compile": True, "algorithm": "everything"}
        results, _, _ = await trained_by(model, tmp_path, 2, **changes)
    (warned,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warned["event"] == "learner.rank.compile: decoder blocks run uncompiled"
    assert warned["ranks"] == 2 and "compiler" in warned["why"]
    # Two of the policy, of the reference and of the critic.
    assert results[-1].metrics["policy/uncompiled_blocks"] == 3 * 2
