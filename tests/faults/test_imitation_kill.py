"""kill -9 of a learner that imitates a recorded run: it ends with the same bits as an undisturbed
one, and no other service is started for it."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_common.run_folder.journal_file import BEGAN_WITH
from flotilla_common.weights.fingerprint import tokenizer_digest
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.demonstrations.run_episodes import make_demonstrations
from tests.faults.harness import GATEWAY, LEARNER, NOTICE_SOON, RANK, VLLM_ROLLOUT, FaultRun
from tests.reading.inspector.made_runs import MadeAttempt, conversation, open_run
from tests.support.checkpoints import saved_state
from tests.support.tiny_ranks import SMALL_SIZES, same_bits

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
RECORDED = "recorded-20260101-120000"
STEPS, GROUPS = 40, 10


async def record_run(runs: Path) -> Path:
    """Write a run of which every first attempt of a group passes; return the folder of its model,
    whose vocabulary has room for its tokenizer."""
    run = open_run(runs, RECORDED)
    model = runs.parent / "model"
    digest = tokenizer_digest(model)
    await run.journal.begin_epoch(1)
    await run.journal.set_meta({BEGAN_WITH: {"tokenizer": digest.hex()}})
    for number in range(GROUPS):
        good, bad = conversation(2 + number % 3, words=number), conversation(2, answer="lost")
        group = await run.add_group([MadeAttempt(good, 1.0), MadeAttempt(bad, 0.0)])
        await run.plan_step(number + 1, [group])
    await run.journal.close()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SMALL_SIZES, "vocab_size": run.tokenizer.get_vocab_size()}
    Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=1024)).save_pretrained(model)
    return model


def spec(model: Path) -> dict[str, Any]:
    return {
        "name": "faults",
        "policy": {"model": str(model), "dtype": "float32", "max_model_len": 1024},
        "learner": {
            "sft": {"sequences_per_step": 3, "heldout": 0.2, "heldout_every": 8},
            "steps": STEPS,
            "optimizer": {"lr": 1e-2},
            "checkpoint": {"every": 10},
        },
        "launcher": NOTICE_SOON,
    }


@pytest.fixture
async def begun(tmp_path: Path) -> AsyncGenerator[tuple[FaultRun, FaultRun]]:
    """Two runs of one spec, each beside a copy of the recorded one."""
    model = await record_run(tmp_path / "one" / "runs")
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "one" / "runs", tmp_path / "two" / "runs")
    runs = (FaultRun(tmp_path / "one", spec(model)), FaultRun(tmp_path / "two", spec(model)))
    yield runs
    for run in runs:
        await run.end()


def losses(run: FaultRun, name: str) -> list[tuple[int, float]]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(point["step"], point[name]) for point in found if name in point]


async def test_a_killed_learner_ends_with_the_bits_of_an_undisturbed_one(
    begun: tuple[FaultRun, FaultRun],
) -> None:
    undisturbed, killed = begun
    arguments = ("--from", RECORDED, "--best-of", "2")
    await undisturbed.train(*arguments, command="sft")
    await undisturbed.completes()
    await killed.train(*arguments, command="sft")
    await killed.step(13)
    assert not killed.processes(GATEWAY) and not killed.processes(VLLM_ROLLOUT)
    killed.kill(LEARNER, RANK)
    assert killed.steps() < STEPS, "it was over before it could be killed"
    await killed.completes()

    for run in (undisturbed, killed):
        await run.gone(10.0)
        run.check_books(STEPS)
        assert run.query("SELECT * FROM publications") == []
        assert (run.folder / "model" / "model.safetensors").exists(), "no export"
        found = losses(run, "sft/loss")
        assert [step for step, _ in found] == list(range(1, STEPS + 1))
        assert found[-1][1] < found[0][1] - 1
        assert [step for step, _ in losses(run, "sft/heldout_loss")] == [0, *range(8, 41, 8)]
    last = f"checkpoints/step-{STEPS:06d}"
    one, other = (saved_state(run.folder / last) for run in (undisturbed, killed))
    assert same_bits(one, other)
    assert losses(undisturbed, "sft/heldout_loss") == losses(killed, "sft/heldout_loss")
    assert f"{GROUPS:,} sequences with" in killed.output
    assert "An epoch is at most 4 steps of 3 sequences" in killed.output
    services = {path.name for path in (killed.folder / "logs").iterdir()}
    assert not any(name.startswith(("rollout", "env_gateway")) for name in services)


async def test_another_tokenizer_is_refused_before_a_step(
    begun: tuple[FaultRun, FaultRun],
) -> None:
    run, _ = begun
    data = run.runs.parent / "recorded.npz"
    await asyncio.to_thread(
        make_demonstrations, run.runs / RECORDED, data, AcceptanceRules(best_of=2)
    )
    model = Path(json.loads(run.path.read_text())["policy"]["model"])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    await asyncio.to_thread((model / "chat_template.jinja").write_text, template)
    await run.train("--learner.objective=sft", f"--learner.sft.data={data}")
    assert await run.exit() == 1, run.state()
    assert "token ids of another tokenizer or chat template" in run.output
    assert run.steps() == 0
