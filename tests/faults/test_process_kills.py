"""kill -9 of any process of a run: the run resumes, and nothing is trained twice or lost."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.faults.harness import (
    ENGINE,
    ENVIRONMENTS,
    GATEWAY,
    LEARNER,
    MCP,
    RANK,
    ROLLOUT,
    VLLM_ROLLOUT,
    FaultRun,
)
from tests.faults.replay import replayed
from tests.faults.small_policy import redraw
from tests.support.checkpoints import saved_state
from tests.support.tiny_ranks import same_bits

pytestmark = pytest.mark.timeout(400)
NewRun = Callable[..., FaultRun]
MODEL = "model.safetensors"


@pytest.mark.slow
async def test_a_run_survives_its_rollout_its_environments_and_its_gateway(
    new_run: NewRun,
) -> None:
    run = new_run(env_gateway=MCP, learner={"steps": 4})
    modules = (ROLLOUT, ENVIRONMENTS, GATEWAY)
    await run.train()
    await run.step(1)
    before = {module: run.processes(module) for module in modules}
    run.kill(*modules)
    for module in modules:
        await run.restarted(module, before[module])
    await run.completes()
    await run.check_end(4)


@pytest.mark.slow
async def test_a_run_survives_each_of_them_alone(new_run: NewRun) -> None:
    run = new_run(env_gateway=MCP, learner={"steps": 8})
    await run.train()
    for module in (ROLLOUT, ENVIRONMENTS, GATEWAY):
        await run.step(run.steps() + 1)
        before = run.processes(module)
        run.kill(module)
        await run.restarted(module, before)
        await run.step(run.steps() + 1)
    await run.completes()
    await run.check_end(8)


@pytest.mark.slow
async def test_a_killed_learner_ends_with_the_parameters_of_an_undisturbed_one(
    new_run: NewRun, policy: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(policy, tmp_path / "policy")
    run = new_run(learner={"steps": 6, "checkpoint": {"every": 3}}, policy={"model": str(own)})
    await run.train()
    await run.step(1)
    run.keep_payloads()
    run.kill_command()
    run.kill_launcher()
    run.kill(LEARNER, RANK, ROLLOUT, GATEWAY)
    assert await run.exit() == -signal.SIGKILL
    await _refuses_another_policy(run, own)
    await run.train("--resume")
    await run.step(5)
    run.kill(LEARNER, RANK)
    await run.completes()
    await run.check_end(6)
    final = saved_state(run.folder / "checkpoints" / "step-000006")
    trained = {name: final[f"model/{name}"] for name in load_file(policy / MODEL)}
    assert not same_bits(trained, load_file(policy / MODEL))
    assert same_bits(final, saved_state(await replayed(run, tmp_path)))


async def _refuses_another_policy(run: FaultRun, policy: Path) -> None:
    kept = (policy / MODEL).read_bytes()
    redraw(policy, seed=1)
    await run.train("--resume")
    assert await run.exit() == 1, run.state()
    assert "its weights are not those that this run started with" in run.output
    (policy / MODEL).write_bytes(kept)
    run.check_books()


@pytest.mark.slow
async def test_a_run_survives_its_rank(new_run: NewRun) -> None:
    run = new_run()
    await run.train()
    await run.step(2)
    before = run.processes(RANK)
    run.kill(RANK)
    await run.restarted(RANK, before)
    await run.completes()
    await run.check_end(6)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("module", [ENGINE, VLLM_ROLLOUT])
async def test_a_run_with_a_real_engine_survives_it(new_run: NewRun, module: str) -> None:
    run = new_run(
        learner={"steps": 4},
        rollout={"max_generate_length": 16, "engine": {"device": "cpu", "max_num_seqs": 8}},
        launcher={"modules": {}},
    )
    run.limit_s = 240.0
    await run.train()
    await run.step(1)
    before = run.processes(module)
    run.kill(module)
    await run.restarted(module, before)
    await run.completes()
    await run.check_end(4)
    journaled = run.query("SELECT DISTINCT run_epoch FROM epochs")
    assert len(journaled) == 1, "the learner went on undisturbed"
