import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from flotilla_common.process.python_command import python_command
from flotilla_learner.hosted.adapters import tinker_trainer
from flotilla_learner.hosted.hosted_ranks import HostedRanks
from flotilla_learner.ports import RankError
from tests.learner.hosted.conftest import HostedFront
from tests.learner.hosted.hosted_runs import open_ranks, started, train_batch
from tests.support.faulty_tinker import FaultyTinker, faulty_tinker
from tests.support.repository import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
BACKWARD, UPDATE, RESULT = "forward_backward", "optim_step", "retrieve_future"


@pytest.fixture
async def proxy(front: HostedFront) -> AsyncGenerator[FaultyTinker]:
    async with faulty_tinker(front.url) as one:
        yield one


@pytest.fixture
async def ranks(proxy: FaultyTinker, tmp_path: Path) -> AsyncGenerator[HostedRanks]:
    async with started(tmp_path, proxy.url) as one:
        yield one


@pytest.mark.parametrize(
    ("call", "status", "times"),
    [
        (BACKWARD, 429, 2),
        (UPDATE, 503, 2),
        (RESULT, 500, 2),
        (UPDATE, 402, 1),
        # A result that was dropped: the order is sent again.
        (RESULT, 410, 1),
    ],
)
async def test_what_passes_is_waited_for_and_a_step_is_made_once(
    proxy: FaultyTinker, ranks: HostedRanks, front: HostedFront, call: str, status: int, times: int
) -> None:
    proxy.refuse(call, status, times=times)
    result = await ranks.train_step(train_batch())
    assert result.metrics["policy/updates"] == 1
    assert front.trainer.updates == 1
    assert proxy.count(call) > times


@pytest.mark.parametrize("call", [BACKWARD, UPDATE])
async def test_an_answer_that_is_lost_on_the_way_is_asked_for_again(
    proxy: FaultyTinker, ranks: HostedRanks, front: HostedFront, call: str
) -> None:
    proxy.drop(call, carried_out=True)
    await ranks.train_step(train_batch())
    await ranks.train_step(train_batch(2))
    assert front.trainer.updates == 2


async def test_an_outage_costs_no_work(
    proxy: FaultyTinker, ranks: HostedRanks, front: HostedFront
) -> None:
    proxy.go_down()
    step = asyncio.create_task(ranks.train_step(train_batch()))
    await asyncio.sleep(3)
    assert not step.done()
    proxy.heal()
    assert (await step).metrics["policy/updates"] == 1
    assert front.trainer.updates == 1


async def test_what_the_service_gave_up_is_not_asked_for_forever(
    proxy: FaultyTinker, ranks: HostedRanks
) -> None:
    proxy.refuse(RESULT, 410, times=99)
    with pytest.raises(RankError, match="newest checkpoint at the next start"):
        await ranks.train_step(train_batch())


async def test_a_refused_key_is_named(proxy: FaultyTinker, ranks: HostedRanks) -> None:
    proxy.refuse(BACKWARD, 401, times=99)
    with pytest.raises(RankError, match="refuses the key in TINKER_API_KEY"):
        await ranks.train_step(train_batch())


async def test_patience_ends(
    proxy: FaultyTinker, front: HostedFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_trainer, "SAY_S", 0.5)
    ranks = open_ranks(tmp_path, proxy.url, patience_s=2)
    await ranks.start_ranks(None)
    proxy.go_down()
    with pytest.raises(RankError, match=r"longer than policy\.tinker\.patience_s"):
        await ranks.train_step(train_batch())
    proxy.heal()
    await ranks.close()
    async with started(tmp_path, front.url) as again:
        await again.train_step(train_batch())
    assert front.trainer.updates == 1


async def test_a_wait_is_progress_as_long_as_the_service_answers(
    front: HostedFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_trainer, "SAY_S", 0.2)
    moved: list[int] = []
    async with started(
        tmp_path, front.url, patience_s=1, note_progress=lambda: moved.append(1)
    ) as ranks:
        front.trainer.pause_s = 1.5
        await ranks.train_step(train_batch())
    assert len(moved) > 5


async def test_where_a_state_is_only_loaded_into_a_model_there_is_one_for_it(
    proxy: FaultyTinker, front: HostedFront, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    async with started(tmp_path / "first", proxy.url) as ranks:
        await ranks.train_step(train_batch())
        await (await ranks.begin_checkpoint(checkpoint))
        expected = await ranks.train_step(train_batch(2))
    proxy.refuse("load_weights", 422)
    async with started(tmp_path / "second", proxy.url, checkpoint) as ranks:
        found = await ranks.train_step(train_batch(2))
    assert found.metrics["policy/loss"] == expected.metrics["policy/loss"]
    assert proxy.count("load_weights") == 2
    assert front.trainer.updates == 3


async def digest_in_a_process() -> bytes:
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", "tests.learner.hosted.adapters.batch_bytes"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output


async def test_a_batch_has_the_same_bytes_in_every_process() -> None:
    first, second = await asyncio.gather(digest_in_a_process(), digest_in_a_process())
    assert first == second
