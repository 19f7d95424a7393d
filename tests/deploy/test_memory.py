"""Statements of the run specs about GPU memory, as the doctor computes it from the models' own
shapes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.spec import parse_shared
from flotilla_common.spec.spec_loading import apply_override, load_spec
from flotilla_launcher.doctor.findings import ProbeResult, Status
from flotilla_launcher.doctor.memory_estimate import GIB, estimate_engine, estimate_trainer
from flotilla_launcher.doctor.model_size import read_model_size
from tests.support.doctor import check, probed, sections, subject
from tests.support.repository import ROOT

QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
# From the models' config.json on the hub; weights are not needed.
SHAPES: dict[str, dict[str, Any]] = {
    "openenv-fleet-grpo": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **QWEN,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "own-tools": {
        **QWEN,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-32b": {
        **QWEN,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}


async def memory_of(
    tmp_path: Path, stem: str, *changes: str, gpus: tuple[int, ...] = ()
) -> ProbeResult:
    """Return the doctor's findings about the memory of a spec on the machines that it requests, or
    on one with these GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[stem]))
    spec = load_spec(ROOT / f"deploy/runs/{stem}.toml")
    for change in (f"--policy.model={tmp_path}", "--launcher.backend=sky", *changes):
        apply_override(spec, change)
    return await probed("memory", replace(subject(spec, tmp_path), gpus=gpus))


@pytest.mark.parametrize(
    ("stem", "parameters"),
    [("openenv-fleet-grpo", "1.54 B"), ("qwen3-8b", "8.19 B"), ("qwen3-32b", "32.76 B")],
)
async def test_a_run_that_trains_fits_into_its_machines(
    tmp_path: Path, stem: str, parameters: str
) -> None:
    result = await memory_of(tmp_path, stem)
    assert result.status in (Status.OK, Status.WARN), result.detail
    assert parameters in result.detail


@pytest.mark.slow
async def test_8b_trains_and_samples_on_four_gpus_of_80_gb(tmp_path: Path) -> None:
    result = await memory_of(tmp_path, "qwen3-8b", gpus=(80 * GIB,) * 4)
    assert result.status is Status.OK, result.detail
    three = await memory_of(tmp_path, "qwen3-8b", gpus=(80 * GIB,) * 3)
    check(three, Status.FAIL, "come to 4 for all replicas, the machine of --gpus has 3")


async def test_32b_is_refused_with_the_key_that_is_missing_when_its_ranks_do_not_split_it(
    tmp_path: Path,
) -> None:
    result = await memory_of(tmp_path, "qwen3-32b", "--learner.rank.shard=false")
    check(result, Status.FAIL, "for the learner's", "; set learner.rank.shard = true")


@pytest.mark.parametrize("gpu", [24, 80])
async def test_ones_own_tools_are_trained_on_one_gpu(tmp_path: Path, gpu: int) -> None:
    result = await memory_of(tmp_path, "own-tools", gpus=(gpu * GIB,))
    assert result.status is Status.OK, result.detail
    assert "4.02 B parameters" in result.detail


async def test_8b_with_ones_own_tools_needs_more_than_24_gb(tmp_path: Path) -> None:
    shape = {**SHAPES["qwen3-8b"], "tie_word_embeddings": False}
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b/config.json").write_text(json.dumps(shape))
    larger = f"--policy.model={tmp_path / '8b'}"
    small = await memory_of(tmp_path, "own-tools", larger, gpus=(24 * GIB,))
    check(small, Status.FAIL, "leaves nothing for KV beside 15.3 GiB of weights", "raise")
    large = await memory_of(tmp_path, "own-tools", larger, gpus=(80 * GIB,))
    assert large.status is Status.OK, large.detail


OWN_TOOLS = {
    "Qwen3-1.7B": {**SHAPES["own-tools"], "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": SHAPES["own-tools"],
    "Qwen3-8B": SHAPES["qwen3-8b"],
}


@pytest.mark.parametrize("name", OWN_TOOLS)
def test_the_page_about_ones_own_tools_has_what_plan_computes(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OWN_TOOLS[name]))
    spec = load_spec(ROOT / "deploy/runs/own-tools.toml", [f"--policy.model={tmp_path}"])
    own, policy = sections(spec), parse_shared(spec, where="spec").policy
    model = read_model_size(tmp_path)
    engine = estimate_engine(model, policy, own["rollout"])
    learner = estimate_trainer(model, policy, own["learner"]).device
    rooms = [engine.kv_cache_bytes(gpu * GIB) // engine.sequence for gpu in (24, 80)]
    figures = [f"{size / GIB:.1f}" for size in (engine.weights, learner, engine.sequence)]
    figures += [str(room) if room > 0 else "does not fit" for room in rooms]
    row = f"| {' | '.join((name, *figures))} |"
    assert row in (ROOT / "docs/own_tools.md").read_text(), row
