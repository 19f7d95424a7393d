"""A real model, trained on two machines with S3 between them, and on one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from flotilla_learner.checkpoints import background_uploads
from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore
from flotilla_learner.checkpoints.remote_restore import restore
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import Publication
from tests.support.checkpoints import saved_state
from tests.support.learner import make_config
from tests.support.rank_configs import policy_config
from tests.support.remote_checkpoints import RUN_ID, manifests, train
from tests.support.tiny_ranks import same_bits

# Fakes sample: their logprobs have nothing to do with the model.
CHANGES: dict[str, Any] = {
    "max_staleness": 0,
    "checkpoint": {"every": 2, "keep": 2},
    "guard": {"mode": "off"},
    "optimizer": {"lr": 1e-3},
}


class TrustedRanks(LocalRanks):
    """Trusts workers that cannot compute the canary with the model."""

    async def publish_weights(self, version: int) -> Publication:
        published = await super().publish_weights(version)
        message = np.full(len(published.canary_token_ids) - 1, -1.0, dtype=np.float32)
        return replace(published, canary_logprobs=message)


async def run(model: Path, folder: Path, store: FsspecStore | None, steps: int) -> None:
    """One start of the run, up to so many steps."""
    shm = folder / "shm"
    shm.mkdir(parents=True, exist_ok=True)
    config = make_config(folder, steps=steps, **CHANGES)
    ranks = TrustedRanks(RUN_ID, policy_config(model), config, folder / "rank.log", shm)
    try:
        await train(folder, store, ranks, timeout_s=250, steps=steps, **CHANGES)
    finally:
        await ranks.close()


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    return saved_state(folder / "run" / "checkpoints" / f"step-{step:06d}")


@pytest.mark.slow
@pytest.mark.timeout(280)
async def test_parameters_and_optimizer_are_those_of_one_machine_bit_for_bit(
    s3: FsspecStore, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_uploads, "BEAT_S", 10.0)
    old, new, whole = tmp_path / "old", tmp_path / "new", tmp_path / "whole"
    await run(model_folder, whole, None, 6)
    await run(model_folder, old, s3, 4)
    assert manifests(s3) == ["e000001-s000002", "e000001-s000004"]
    new.mkdir()
    restore(s3, new / "runs", name="test")
    (new / "runs" / RUN_ID).rename(new / "run")
    await run(model_folder, new, s3, 6)
    assert same_bits(weights(new, 6), weights(whole, 6))
    assert not same_bits(weights(new, 4), weights(new, 6))
    assert manifests(s3)[-1] == "e000002-s000006"
