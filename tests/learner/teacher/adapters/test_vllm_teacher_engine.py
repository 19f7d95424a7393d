"""A real vLLM as the teacher: its scores are transformers' log-softmax at temperature 1."""

import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from flotilla_learner.config.teacher import TeacherConfig
from flotilla_learner.ports import TeacherRefusedError
from flotilla_learner.teacher.adapters.vllm_teacher import VllmTeacher
from tests.support.rank_configs import policy_config
from tests.support.tiny_model import VOCAB, load_model
from tests.support.vllm_server_process import serving_vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(500)]

MODE = "processed_logprobs"
LENGTH, K = 90, 32


@pytest.fixture(scope="module")
def served(engine_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As engines of this product are: under a mode in which the logprobs of sampled tokens depend
    on the temperature."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    options = ("--logprobs-mode", MODE, "--max-logprobs", str(K), "--max-model-len", "256")
    with serving_vllm(engine_folder, log, *options) as url:
        yield url


@asynccontextmanager
async def asking(url: str, folder: Path, top_k: int) -> AsyncGenerator[VllmTeacher]:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()
    teacher = VllmTeacher(TeacherConfig(url=url), top_k, policy_config(folder), digest)
    try:
        yield teacher
    finally:
        await teacher.close()


def draw_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, LENGTH).astype(np.int32)


def reference_rows(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("top_k", [0, K])
async def test_scores_are_those_of_transformers(
    served: str, engine_folder: Path, top_k: int
) -> None:
    ids, places = draw_ids(), np.arange(1, LENGTH)
    async with asking(served, engine_folder, top_k) as teacher:
        await teacher.prove_tokenizer()
        found = await teacher.score_tokens(ids, places)
    rows = reference_rows(load_model(engine_folder), ids)[:-1]
    own = rows.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None]).squeeze(1)
    np.testing.assert_allclose(found.logprobs, own.numpy(), rtol=0, atol=1e-4)
    top = rows.topk(top_k).values
    np.testing.assert_allclose(found.top_logprobs, top.numpy(), rtol=0, atol=1e-4)
    named = rows.gather(1, torch.from_numpy(found.top_ids.astype(np.int64)))
    np.testing.assert_allclose(found.top_logprobs, named.numpy(), rtol=0, atol=1e-4)


async def test_no_sampling_parameter_of_a_request_changes_the_scores_of_its_prompt(
    served: str, engine_folder: Path
) -> None:
    """So a policy that samples at another temperature cannot be compared with them."""
    ids = draw_ids().tolist()
    asked = {"model": str(engine_folder), "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    found: list[list[float]] = []
    async with httpx.AsyncClient(timeout=60) as http:
        for given in (
            {"temperature": 1.0},
            {"temperature": 0.3},
            {"temperature": 1.0, "top_p": 0.5, "repetition_penalty": 1.5},
        ):
            answer = await http.post(f"{served}/completions", json=asked | given)
            scored = answer.json()["choices"][0]["prompt_logprobs"]
            found.append([next(iter(each.values()))["logprob"] for each in scored[1:]])
    assert found[0] == found[1] == found[2]


async def test_more_likeliest_tokens_than_the_server_gives_are_refused_with_its_reason(
    served: str, engine_folder: Path
) -> None:
    async with asking(served, engine_folder, K + 1) as teacher:
        with pytest.raises(TeacherRefusedError, match=f"greater than max allowed: {K}"):
            await teacher.prove_tokenizer()


async def test_a_server_of_logits_is_refused(engine_folder: Path, tmp_path: Path) -> None:
    options = ("--logprobs-mode", "processed_logits", "--max-model-len", "256")
    with serving_vllm(engine_folder, tmp_path / "log", *options) as url:
        async with asking(url, engine_folder, 4) as teacher:
            with pytest.raises(TeacherRefusedError, match="--logprobs-mode"):
                await teacher.prove_tokenizer()
