"""A learner whose ranks are on several machines: the step of one machine, and no machine left."""

import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from flotilla_common.weights.network_interfaces import interface_towards
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import Publication, StepResult
from tests.learner.ranks import nodes
from tests.learner.ranks.nodes import HOST, RUN, config_of, head, left_of, start_machine
from tests.support.checkpoints import save_ranks
from tests.support.process_commands import rank_pids
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch

# For the other ranks to fail or answer, too.
GRACE_S = 5.0
EVERYTHING = {
    "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.05}, "epochs": 2, "mini_batches": 2}
}


async def one_machine(
    folder: Path, model: Path, ranks: int, checkpoint: Path | None = None, **learner: object
) -> tuple[StepResult, Publication]:
    """The first step, or the one after a checkpoint, of as many ranks on one machine."""
    shm = folder / "alone"
    shm.mkdir()
    config = config_of(1, ranks, **learner)
    alone = LocalRanks("alone", policy_config(model), config, folder / "alone.log", shm)
    try:
        step = (await alone.start_ranks(checkpoint)).step + 1
        return await alone.train_step(make_batch(step=step)), await alone.publish_weights(step)
    finally:
        await alone.close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
async def test_two_machines_make_the_step_of_one_with_as_many_ranks(
    model_folder: Path, tmp_path: Path
) -> None:
    alone = asyncio.create_task(one_machine(tmp_path, model_folder, 2))
    async with head(tmp_path, model_folder, config_of(2)) as learner:
        machine = await learner.machine()
        assert (await learner.ranks.start_ranks(None)).step == 0
        with pytest.raises(RankError, match="step 5 requested, but the next is 1"):
            await learner.ranks.train_step(make_batch(step=5))
        result = await learner.ranks.train_step(make_batch(step=1))
        published = await learner.ranks.publish_weights(1)
        await learner.cluster.dismiss_machines()
        assert await machine.ended() == 0
    expected, there = await alone
    assert result.metrics == expected.metrics
    assert published.fingerprint == there.fingerprint
    assert left_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
async def test_machines_without_the_checkpoint_resume_from_it(
    model_folder: Path, tmp_path: Path, processes: int
) -> None:
    config = config_of(2, processes, **EVERYTHING)
    async with head(tmp_path, model_folder, config) as learner:
        await learner.machine()
        await learner.ranks.start_ranks(None)
        await learner.ranks.train_step(make_batch(step=1))
        files = await save_ranks(learner.ranks, tmp_path / "checkpoint")
        # Another start, with the machine's second membership.
        assert (await learner.ranks.start_ranks(files.directory)).step == 1
        result = await learner.ranks.train_step(make_batch(step=2))
        published = await learner.ranks.publish_weights(2)
    expected, there = await one_machine(
        tmp_path, model_folder, 2 * processes, files.directory, **EVERYTHING
    )
    assert result.metrics == expected.metrics
    assert published.fingerprint == there.fingerprint


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [{}, EVERYTHING])
async def test_machines_that_split_the_model_among_their_own_ranks_hold_the_same(
    model_folder: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    config = config_of(2, 2, rank={"shard": True, "shard_within_node": True}, **settings)
    async with head(tmp_path, model_folder, config) as learner:
        await learner.machine()
        await learner.ranks.start_ranks(None)
        await learner.ranks.train_step(make_batch(step=1))
        await learner.ranks.publish_weights(1)
        files = await save_ranks(learner.ranks, tmp_path / "checkpoint")
        assert (await learner.ranks.start_ranks(files.directory)).step == 1
        result = await learner.ranks.train_step(make_batch(step=2))
        published = await learner.ranks.publish_weights(2)
    expected, there = await one_machine(tmp_path, model_folder, 4, files.directory, **settings)
    for name in ("policy/loss", "policy/grad_norm", "policy/post_update_kl"):
        bound = pytest.approx(expected.metrics[name], abs=1e-5, rel=1e-5)
        assert result.metrics[name] == bound, name
    np.testing.assert_allclose(published.canary_logprobs, there.canary_logprobs, rtol=0, atol=1e-5)


@pytest.mark.slow
async def test_a_killed_rank_is_an_error_of_all_in_two_seconds_with_the_end_of_its_log(
    model_folder: Path, tmp_path: Path
) -> None:
    async with head(tmp_path, model_folder, config_of(2)) as learner:
        machine = await learner.machine()
        await learner.ranks.start_ranks(None)
        (rank,) = machine.ranks()
        here = rank_pids()
        log = tmp_path / "machine-1" / RUN / "logs" / "learner-node-1-rank-0.log"
        log.write_text("its last words")
        # Stopped, it takes the batch and never answers.
        rank.suspend()
        training = asyncio.create_task(learner.ranks.train_step(make_batch()))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        rank.kill()
        with pytest.raises(RankError, match=r"(?s)machine 1 \(.*killed by signal 9.*last words"):
            await training
        assert time.monotonic() - started < 2 + GRACE_S
        with pytest.raises(RankError, match="killed"):
            await learner.ranks.train_step(make_batch())
        await learner.ranks.close()
        assert not any(psutil.pid_exists(pid) for pid in here)
        # Another group, on the node that has stayed.
        assert (await learner.ranks.start_ranks(None)).step == 0
        assert not (await learner.ranks.train_step(make_batch())).skipped
        assert machine.process.returncode is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_machine_that_is_killed_or_stands_still_is_an_error_of_all(
    model_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with head(tmp_path, model_folder, config_of(2)) as learner:
        machine = await learner.machine()
        await learner.ranks.start_ranks(None)
        everything = psutil.Process(machine.process.pid).children(recursive=True)
        training = asyncio.create_task(learner.ranks.train_step(make_batch()))
        try:
            strike(everything, number)
            started = time.monotonic()
            with pytest.raises(RankError, match=r"machine 1 \(|Connection|Gloo|gloo"):
                await training
            assert time.monotonic() - started < 20
        finally:
            strike(everything, signal.SIGKILL)


def strike(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.slow
async def test_a_group_resumes_with_as_few_ranks_as_it_may(
    model_folder: Path, tmp_path: Path
) -> None:
    config = config_of(3, rank={"min_ranks": 2, "join_s": 8.0})
    async with head(tmp_path, model_folder, config) as learner:
        await learner.machine()
        assert (await learner.ranks.start_ranks(None)).step == 0
        result = await learner.ranks.train_step(make_batch(step=1))
    expected, _ = await one_machine(tmp_path, model_folder, 2)
    assert result.metrics == expected.metrics


@pytest.mark.slow
async def test_a_group_without_enough_machines_lists_the_missing_ones(
    model_folder: Path, tmp_path: Path
) -> None:
    config = config_of(3, rank={"min_ranks": 3, "join_s": 1.0})
    async with head(tmp_path, model_folder, config) as learner:
        with pytest.raises(RankError, match=r"machine 1, 2 of 3 has not joined in 1 s: run"):
            await learner.ranks.start_ranks(None)


HEAD = """
import asyncio, sys
from pathlib import Path
from tests.learner.ranks.nodes import config_of, head

async def main():
    config = config_of(2, rank={"ray_port": int(sys.argv[3])})
    async with head(Path(sys.argv[2]), Path(sys.argv[1]), config) as learner:
        await learner.ranks.start_ranks(None)
        print("started", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_machine_whose_learner_disappears_ends_by_itself(
    model_folder: Path, tmp_path: Path
) -> None:
    config = config_of(2, rank={"join_s": 2.0})
    gone = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HEAD, str(model_folder), str(tmp_path)),
        str(config.rank.ray_port),
        stdout=asyncio.subprocess.PIPE,
    )
    assert gone.stdout is not None
    folder = tmp_path / "machine"
    patient = ("--learner.rank.join_s=15",)
    machine = await start_machine(folder, config, policy_config(model_folder), *patient)
    try:
        async with asyncio.timeout(100):
            while await gone.stdout.readline() != b"started\n":
                assert gone.returncode is None
        gone.kill()
        assert await machine.ended(60) == 3
        assert "no learner for 15 s" in machine.output
        assert left_of(folder) == []
    finally:
        if machine.process.returncode is None:
            machine.process.kill()
        await gone.wait()


@pytest.mark.slow
async def test_a_machine_that_has_to_go_has_the_learner_drain(
    model_folder: Path, tmp_path: Path
) -> None:
    async with head(tmp_path, model_folder, config_of(2)) as learner:
        machine = await learner.machine()
        await learner.ranks.start_ranks(None)
        machine.process.terminate()
        await asyncio.wait_for(learner.drain.wait(), 10)
        # Until the learner has drained, its ranks are needed.
        assert machine.process.returncode is None
        assert not (await learner.ranks.train_step(make_batch())).skipped
        await learner.cluster.dismiss_machines()
        assert await machine.ended() == 0
    assert left_of(tmp_path) == []


@pytest.mark.slow
async def test_a_machine_with_another_token_is_refused_with_cause(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(2, rank={"join_s": 25.0})
    async with head(tmp_path, model_folder, config) as learner:
        starting = asyncio.create_task(learner.ranks.start_ranks(None))
        monkeypatch.setattr(nodes, "TOKEN", "a-token-of-strangers")
        machine = await learner.machine()
        # Ray tries for a while.
        assert await machine.ended(120.0) == 2
        assert "refuses this machine" in machine.output
        with pytest.raises(RankError, match=r"machine 1 of 2 has not joined"):
            await starting


@pytest.mark.slow
async def test_a_machine_with_another_number_of_ranks_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    async with head(tmp_path, model_folder, config_of(2)) as learner:
        await learner.machine("--learner.rank.processes=2")
        with pytest.raises(RankError, match=r"learner\.rank\.processes = 2, the head 1"):
            await learner.ranks.start_ranks(None)


async def test_a_machine_that_the_learner_does_not_count_ends(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "machine"
    machine = await start_machine(folder, config_of(2), policy_config(model_folder), number=2)
    assert await machine.ended() == 2
    assert "--replica 2: learner.rank.nodes is 2" in machine.output


def test_ranks_of_several_machines_are_refused_on_a_public_network() -> None:
    with pytest.raises(ValidationError, match=r"learner\.rank\.network = 'private'"):
        RankConfig(nodes=2, network="public")
    assert RankConfig(nodes=1, network="public").processes == 1


def test_more_ranks_than_there_are_can_never_suffice() -> None:
    with pytest.raises(ValidationError, match=r"nodes and processes make 4 ranks"):
        RankConfig(nodes=2, processes=2, min_ranks=5)
    assert RankConfig(nodes=2, processes=2, min_ranks=4).min_ranks == 4


def test_an_address_leads_to_its_interface() -> None:
    assert interface_towards(HOST) == interface_towards("127.0.0.2") == "lo"
