"""Weights between processes that have GPUs: over ipc on one GPU, over NCCL between two.

`tests/learner/weights/test_weight_sender.py` tries the same on a CPU."""

from pathlib import Path

import pytest
import torch

from tests.support.transfer_trials import Way, try_transfers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
async def test_on_one_gpu_whatever_becomes_of_one_the_others_are_sent_what_was_published(
    tmp_path: Path,
) -> None:
    await try_transfers(tmp_path, Way("ipc", "cuda:0"))


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one"
)
async def test_between_gpus_whatever_becomes_of_one_the_others_are_sent_what_was_published(
    tmp_path: Path,
) -> None:
    await try_transfers(tmp_path, Way("nccl", "cuda:1"))
