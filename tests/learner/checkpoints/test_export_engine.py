"""An exported model is served by vLLM as it was trained."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from flotilla_learner.checkpoints.export import export_model
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.policy_loading import load_policy
from tests.learner.checkpoints.test_export import train_checkpoint
from tests.support.tiny_model import VOCAB
from tests.support.tiny_ranks import YARN, reference_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(280)]


async def test_vllm_loads_it_and_gives_the_same_logprobs_beyond_the_original_context(
    engine_folder: Path, tmp_path: Path
) -> None:
    saved, policy = train_checkpoint(tmp_path, engine_folder, rope_scaling=YARN)
    out = tmp_path / "model"
    export_model(saved, Path(policy.model), policy, out)
    ids = np.random.default_rng(0).integers(0, VOCAB, 120).astype(np.int32)
    expected = reference_logprobs(load_policy(policy, RankConfig(), saved), ids, 1.0)
    served = await served_logprobs(out, ids)
    np.testing.assert_allclose(served, expected, atol=1e-3)
    initial = reference_logprobs(load_policy(policy, RankConfig()), ids, 1.0)
    assert np.abs(served - initial).max() > 0.1, "what was trained makes a difference"


async def served_logprobs(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Return logprobs of tokens 1.. of a prompt, by vLLM with nothing but the folder."""
    program = "tests.learner.checkpoints.serve_process"
    command = [sys.executable, "-m", program, str(folder), json.dumps(ids.tolist())]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return np.array(json.loads(output))
