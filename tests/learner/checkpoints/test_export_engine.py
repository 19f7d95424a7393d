"""What a run exports is served by vLLM as it was trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.learner.checkpoints.export import export
from services.learner.rank.config import RankConfig
from services.learner.rank.model import load
from services.rollout.adapters.vllm_options import Model, engine_options, set_environment
from services.rollout.config import EngineConfig
from tests.learner.checkpoints.test_export import make_checkpoint
from tests.learner.rank.support import VOCAB, YARN, reference_logprobs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]


def test_vllm_loads_it_and_gives_the_same_logprobs_beyond_the_original_context(
    tmp_path: Path,
) -> None:
    saved, policy = make_checkpoint(tmp_path, rope_scaling=YARN)
    out = tmp_path / "model"
    export(saved, Path(policy.model), policy, out)
    (out / "tokenizer.json").unlink()
    ids = np.random.default_rng(0).integers(0, VOCAB, 120).astype(np.int32)
    expected = reference_logprobs(load(policy, RankConfig(), saved), ids, 1.0)
    served = served_logprobs(out, ids.tolist())
    np.testing.assert_allclose(served, expected, atol=1e-3)
    initial = reference_logprobs(load(policy, RankConfig()), ids, 1.0)
    assert np.abs(served - initial).max() > 0.1, "what was trained makes a difference"


def served_logprobs(folder: Path, ids: list[int]) -> np.ndarray:
    """Of tokens 1.. of a prompt, by vLLM with nothing but the folder."""
    config = EngineConfig(device="cpu", max_num_seqs=2)
    set_environment(config, local=True)
    from vllm import LLM, SamplingParams, TokensPrompt

    from services.common.spec import PolicyConfig

    plain = PolicyConfig(model=str(folder), dtype="float32", max_model_len=128)
    options = engine_options(config, Model(folder, plain, []))
    del options["worker_extension_cls"]
    engine: Any = LLM(**options, skip_tokenizer_init=True, seed=0)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)
    rows = answer.prompt_logprobs[1:]
    torch.set_num_threads(1)
    return np.array([row[token].logprob for row, token in zip(rows, ids[1:], strict=True)])
