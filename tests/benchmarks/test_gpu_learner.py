"""What the benchmarks of a rank count, and that they run where there is no GPU."""

import copy
import json

import pytest
from transformers import Qwen3Config

from benchmarks import gpu_learner, gpu_session
from benchmarks.executed_work import model_work
from benchmarks.kernel_families import (
    ATTENTION,
    COPIES,
    FAMILIES,
    IDLE,
    OTHER,
    PRODUCTS,
    VOCABULARY,
    Kernel,
    family_of,
    sum_families,
)
from benchmarks.rank_step import random_batch

PUBLISHED_06B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    head_dim=128,
    tie_word_embeddings=True,
)
PARAMETERS_06B = 596_049_920


def test_work_counts_the_head_on_its_tokens_and_attention_within_a_sequence() -> None:
    work = model_work(PUBLISHED_06B, PARAMETERS_06B)
    whole = work.step_flops([16_384], 16_384) / 16_384
    packed = work.step_flops([4_096] * 4, 8_192) / 16_384
    # As prime-rl counts its own: 11,896 tokens a second are 11.1 % of 989 TFLOP/s.
    assert whole * 11_896 / 989e12 == pytest.approx(0.111, abs=5e-4)
    assert whole / 1e9 == pytest.approx(9.21, abs=0.01)
    assert packed / 1e9 == pytest.approx(4.52, abs=0.01)


def test_a_head_of_its_own_counts_and_embeddings_do_not() -> None:
    tied = model_work(PUBLISHED_06B, PARAMETERS_06B)
    head = 151_936 * 1024
    config = copy.copy(PUBLISHED_06B)
    config.tie_word_embeddings = False
    own = model_work(config, PARAMETERS_06B + head)
    assert own == tied


def test_all_tokens_but_the_first_are_in_the_loss_as_in_prime_rls_benchmark() -> None:
    half, whole = random_batch(1, 2, 64, 512), random_batch(1, 2, 64, 512, whole=True)
    assert [int(each.policy_mask.sum()) for each in half.sequences] == [32, 32]
    assert [int(each.policy_mask.sum()) for each in whole.sequences] == [63, 63]


@pytest.mark.parametrize(
    ("name", "shapes", "family"),
    [
        ("aten::_flash_attention_forward flash_fwd_kernel", [[1, 16, 4096, 128]], ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [], ATTENTION),
        ("aten::mm nvjet_tst_128x256", [[4096, 1024], [1024, 151_936]], PRODUCTS),
        ("aten::addmm", [[1, 2]], PRODUCTS),
        ("aten::exp vectorized_elementwise_kernel", [[1024, 151_936]], VOCABULARY),
        ("aten::copy_ unrolled_elementwise_kernel", [[1024, 151_936]], VOCABULARY),
        ("aten::copy_ Memcpy DtoD", [[1024, 1024]], COPIES),
        ("aten::mul vectorized_elementwise_kernel", [[1024, 1024]], OTHER),
        ("aten::_fused_adamw_ multi_tensor_apply_kernel", [], OTHER),
    ],
)
def test_kernels_have_families(name: str, shapes: list[list[int]], family: str) -> None:
    assert family_of(Kernel(name, shapes, 1.0), 151_936) == family


def test_the_rest_of_the_wall_time_is_idle() -> None:
    kernels = [Kernel("aten::mm", [], 2.0), Kernel("aten::exp", [[3, 7]], 1.0)]
    found = sum_families(kernels, 7, 5.0)
    assert (found[PRODUCTS], found[VOCABULARY], found[IDLE]) == (2.0, 1.0, 2.0)
    assert sum(found.values()) == 5.0


@pytest.mark.parametrize("like", [(), ("--like", "prime-rl")])
def test_a_rank_is_measured_and_profiled_on_a_cpu(
    capsys: pytest.CaptureFixture[str], like: tuple[str, ...]
) -> None:
    gpu_learner.main(["--tiny", "--profile", "--steps", "2", *like])
    *shown, last = capsys.readouterr().out.splitlines()
    packs = json.loads(last)["packs"]
    assert [each["pack"] for each in packs] == [64, 128]
    for each in packs:
        # Between steps a batch is made.
        assert 0 < each["wall_tokens_per_s"] <= each["tokens_per_s"] * 1.5
        assert tuple(each["families"]) == FAMILIES
        assert each["families"][PRODUCTS] > 0 and each["families"][VOCABULARY] > 0
    published = [line for line in shown if line.startswith("| prime-rl, published")]
    assert len(published) == (2 if like else 0), "figures stand beside a like measurement only"
    # The same tokens, in longer sequences and all in the loss, are more work.
    assert packs[1]["gflops_per_token"] > 0


def test_a_session_goes_on_after_a_benchmark_that_fails_or_has_no_time() -> None:
    assert "exit code" in gpu_session.run_benchmark(("no_such_module",), 60.0)["failed"]
    assert gpu_session.run_benchmark(("no_such_module",), 0.0) == {"failed": "no time was left"}
    assert gpu_session.LIMIT_S < 600
