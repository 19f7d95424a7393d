"""The burn-in of real ranks: its report, and the findings that end a run."""

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.config.rank import BurnInConfig, RankConfig
from flotilla_learner.ports import RankError
from flotilla_learner.ranks.burn_in import (
    BurnInMemoryError,
    burn_in_lengths,
    explain_failure,
    smallest_change,
)
from flotilla_learner.ranks.local_ranks import LocalRanks
from tests.support.process_commands import rank_pids
from tests.support.rank_configs import LEARNER, policy_config


@pytest.mark.slow
async def test_too_little_memory_ends_the_run_and_names_what_to_change(
    model_folder: Path, tmp_path: Path
) -> None:
    changes = {"burn_in": BurnInConfig(enabled=False), "pack_tokens": 65536}
    rank = LEARNER.rank.model_copy(update=changes)
    config = LEARNER.model_copy(update={"rank": rank})
    ranks = LocalRanks("run", policy_config(model_folder), config, tmp_path / "log", tmp_path)
    try:
        with capture_logs() as logs:
            await ranks.start_ranks(None)
        assert not [line for line in logs if line["event"] == "burn-in passed"]
        (pid,) = rank_pids()
        process = psutil.Process(pid)
        most = process.memory_info().vms + 2**26
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
        with pytest.raises(ConfigError, match=r"burn-in .* set learner\.rank\.pack_tokens = 128"):
            await ranks.burn_in(fresh=True)
        # One that the kernel ends would be ended again, if the run has made no step yet.
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="killed by signal 9"):
            await ranks.burn_in(fresh=False)
        with pytest.raises(ConfigError, match="too little memory"):
            await ranks.burn_in(fresh=True)
    finally:
        await ranks.close()


@pytest.mark.parametrize(
    ("pack_tokens", "longest", "lengths"),
    [
        (4096, 8192, [8192]),
        (4096, 4096, [4096]),
        (4096, 1500, [1500, 1500, 1096]),
        (4097, 2048, [2048, 2048]),
    ],
)
def test_the_longest_pack_is_full_or_one_sequence(
    pack_tokens: int, longest: int, lengths: list[int]
) -> None:
    assert burn_in_lengths(pack_tokens, longest) == lengths


def test_the_change_that_costs_least_comes_first() -> None:
    given: dict[str, object] = {"device": "cuda", "processes": 4, "pack_tokens": 8192}
    found: list[str] = []
    for change in (
        {"pack_tokens": 1024},
        {"gradient_checkpointing": "full"},
        {"offload_activations": True},
        {"shard": True},
        {"offload_optimizer": True},
        {},
    ):
        found.append(smallest_change(RankConfig.model_validate(given), 1024))
        given |= change
    assert found == [
        "set learner.rank.pack_tokens = 1024, policy.max_model_len",
        'set learner.rank.gradient_checkpointing = "full"',
        "set learner.rank.offload_activations = true",
        "set learner.rank.shard = true",
        "set learner.rank.offload_optimizer = true",
        "lower policy.max_model_len, or use more memory",
    ]


def test_another_error_stays_what_it_is() -> None:
    error = RankError("burn_in: ValueError: a bug")
    assert explain_failure(error, RankConfig(), 128, fresh=True) is error
    earlier = RankError(f"burn_in: ValueError: a bug\nlog: {BurnInMemoryError.__name__}: no")
    assert explain_failure(earlier, RankConfig(), 128, fresh=False) is earlier
    full = RankError(f"burn_in: {BurnInMemoryError.__name__}: no")
    assert isinstance(explain_failure(full, RankConfig(), 128, fresh=False), ConfigError)
