import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from flotilla_common.weights.fingerprint import checksum64, compute_fingerprint
from flotilla_learner.ports import RankError
from flotilla_learner.ranks import protocol
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import TrainBatch
from tests.support.checkpoints import save_ranks
from tests.support.process_commands import rank_pids
from tests.support.process_forge import fork_of
from tests.support.rank_configs import LEARNER, policy_config, several
from tests.support.started_process import started
from tests.support.tiny_ranks import make_batch
from tests.support.waiting import until, wait_until

Start = Callable[..., LocalRanks]


@pytest_asyncio.fixture
async def make_ranks(model_folder: Path, tmp_path: Path) -> AsyncIterator[Start]:
    made: list[LocalRanks] = []

    def make(name: str = "run", processes: int = 1) -> LocalRanks:
        shm = tmp_path / f"shm-{name}"
        shm.mkdir(exist_ok=True)
        log = tmp_path / f"{name}.log"
        config = several(processes)
        made.append(LocalRanks(name, policy_config(model_folder), config, log, shm))
        return made[-1]

    yield make
    for ranks in made:
        await ranks.close()


def stale_and_foreign(folder: Path) -> tuple[Path, Path]:
    """A file left by a dead process of the run `run`, and one of another run."""
    stale = protocol.batch_path(folder, "run")
    foreign = protocol.batch_path(folder, "run-2")
    stale.touch()
    foreign.touch()
    return stale, foreign


@pytest.mark.usefixtures("forked_ranks")
async def test_a_second_process_continues_from_a_checkpoint_to_the_same_bits(
    make_ranks: Start, tmp_path: Path
) -> None:
    straight, resumed = make_ranks("straight"), make_ranks("resumed")
    with capture_logs() as logs:
        info = await straight.start_ranks(None)
    assert (info.step, info.vocab_size) == (0, 97)
    (loaded,) = [line for line in logs if line["event"] == "ranks loaded"]
    assert 0.1 < loaded["peak_gib"][0] < 8
    (passed,) = [line for line in logs if line["event"] == "burn-in passed"]
    assert (passed["tokens"], passed["gpu_peak_gib"]) == (LEARNER.rank.pack_tokens, [])
    assert loaded["peak_gib"][0] <= passed["peak_gib"][0] < 8
    assert not (await straight.train_step(make_batch(step=1))).skipped
    files = await save_ranks(straight, tmp_path / "checkpoint")
    assert (await resumed.start_ranks(files.directory)).step == 1
    first, second = [await ranks.train_step(make_batch(step=2)) for ranks in (straight, resumed)]
    assert first.metrics == second.metrics
    left, right = await straight.publish_weights(2), await resumed.publish_weights(2)
    assert left.fingerprint == right.fingerprint
    np.testing.assert_array_equal(left.canary_logprobs, right.canary_logprobs)
    raw = np.fromfile(left.path, np.uint8)
    tensors = load_file(left.path)
    for entry in left.manifest:
        part = raw[entry.offset_bytes :][: tensors[entry.name].nbytes]
        assert checksum64(part) == entry.checksum
    assert compute_fingerprint(left.manifest, left.total_bytes) == left.fingerprint
    assert len(left.canary_logprobs) == len(left.canary_token_ids) - 1
    await straight.close()
    assert list(left.path.parent.iterdir()) == []


@pytest.mark.usefixtures("forked_ranks")
async def test_refusals_leave_the_rank_in_service(make_ranks: Start, tmp_path: Path) -> None:
    ranks = make_ranks()
    with pytest.raises(RankError, match="has not been started"):
        await ranks.publish_weights(0)
    stale, foreign = stale_and_foreign(tmp_path / "shm-run")
    await ranks.start_ranks(None)
    assert (stale.exists(), foreign.exists()) == (False, True)
    with pytest.raises(RankError, match="step 5 requested, but the next is 1"):
        await ranks.train_step(make_batch(step=5))
    with pytest.raises(RankError, match="version 3 requested, but the weights are 0"):
        await ranks.publish_weights(3)
    batch = make_batch(step=1)
    broken = replace(batch.sequences[0], reward=float("inf"))
    with pytest.raises(RankError, match="reward of attempt 0"):
        await ranks.train_step(TrainBatch(1, (broken, *batch.sequences[1:])))
    cancelled = asyncio.create_task(ranks.publish_weights(0))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert not (await ranks.train_step(batch)).skipped


async def test_a_start_that_is_given_up_ends_the_rank_at_once(make_ranks: Start) -> None:
    ranks = make_ranks()
    starting = asyncio.create_task(ranks.start_ranks(None))
    await until(rank_pids)
    (pid,) = rank_pids()
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    began = time.monotonic()
    await ranks.close()
    assert time.monotonic() - began < 9.0, "it was to close, and was waited for"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("forked_ranks")
async def test_a_killed_rank_is_an_error_with_the_end_of_its_log(make_ranks: Start) -> None:
    ranks = make_ranks()
    await ranks.start_ranks(None)
    pid = fork_of(*rank_pids())
    # Stopped, it takes the batch and never answers.
    os.kill(pid, signal.SIGSTOP)
    training = asyncio.create_task(ranks.train_step(make_batch()))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"(?s)killed by signal 9.*run\.log"):
        await training
    with pytest.raises(RankError, match="killed by signal 9"):
        await ranks.publish_weights(0)


@pytest.mark.slow
async def test_two_ranks_train_and_one_resumes_from_their_checkpoint(
    make_ranks: Start, tmp_path: Path
) -> None:
    pair, alone = make_ranks("pair", 2), make_ranks("alone")
    assert (await pair.start_ranks(None)).step == 0
    with pytest.raises(RankError, match="step 5 requested, but the next is 1"):
        await pair.train_step(make_batch(step=5))
    result = await pair.train_step(make_batch(step=1))
    files = await save_ranks(pair, tmp_path / "checkpoint")
    first = await pair.publish_weights(1)
    assert len(rank_pids()) == 2
    assert (await alone.start_ranks(files.directory)).step == 1
    second = await alone.publish_weights(1)
    assert first.fingerprint == second.fingerprint
    left, right = [await ranks.train_step(make_batch(step=2)) for ranks in (pair, alone)]
    assert left.metrics["policy/loss"] == pytest.approx(right.metrics["policy/loss"], abs=1e-6)
    assert result.versions[0].tokens == sum(count for count in tokens(make_batch(step=1)))
    assert left.token_file is not None and right.token_file is not None
    seen, also_seen = protocol.read_tokens(left.token_file), protocol.read_tokens(right.token_file)
    for name in ("advantages", "logprobs", "entropy"):
        for one, other in zip(getattr(seen, name), getattr(also_seen, name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
    await pair.close()
    assert os.listdir(tmp_path / "shm-pair") == []
    assert {"pair.log", "pair-1.log"} <= set(os.listdir(tmp_path))


def tokens(batch: TrainBatch) -> list[int]:
    return [int(sequence.policy_mask.sum()) for sequence in batch.sequences]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
async def test_one_rank_that_dies_is_an_error_of_all_within_seconds(
    make_ranks: Start, victim: int
) -> None:
    ranks = make_ranks(processes=2)
    await ranks.start_ranks(None)
    pids = rank_pids()
    os.kill(pids[victim], signal.SIGSTOP)
    training = asyncio.create_task(ranks.train_step(make_batch()))
    await asyncio.sleep(0.2)
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankError, match=rf"training rank {victim} was killed by signal 9"):
        await training
    assert time.monotonic() - started < 8
    with pytest.raises(RankError, match="killed by signal 9"):
        await ranks.train_step(make_batch())
    await ranks.close()
    assert not {str(pid) for pid in pids} & set(os.listdir("/proc"))


ORPHAN = """
import asyncio, sys
from pathlib import Path
from tests.support.process_commands import rank_pids
from tests.support.rank_configs import LEARNER, policy_config, several
from flotilla_common.telemetry import log
from flotilla_learner.ranks.local_ranks import LocalRanks

log.setup("learner", "orphan")  # logs go to stderr, so that stdout has the pids alone

async def main():
    folder = Path(sys.argv[2])
    policy, config = policy_config(Path(sys.argv[1])), several(int(sys.argv[3]))
    ranks = LocalRanks("orphan", policy, config, folder / "log", folder)
    await ranks.start_ranks(None)
    print(*rank_pids(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


# Of one rank in the quick tests: each takes seconds to load torch.
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_whose_parent_was_killed_end_and_clean_up(
    model_folder: Path, tmp_path: Path, count: int
) -> None:
    command = [sys.executable, "-c", ORPHAN, str(model_folder), str(tmp_path), str(count)]
    with started(command) as (parent, line):
        pids = [int(pid) for pid in line.split()]
        assert len(pids) == count
        assert len(list(tmp_path.glob("*slot*"))) == 3
        parent.kill()
    wait_until(lambda: not any(_runs(pid) for pid in pids), 5.0)
    assert list(tmp_path.glob("*slot*")) == []


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Its parent may be gone, and none reaps it."""
    return ") Z" in Path(f"/proc/{pid}/stat").read_text()
