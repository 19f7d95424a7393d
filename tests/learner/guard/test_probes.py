"""Probes are scored on ranks that do one thing at a time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.guard.mismatch_guard import MismatchGuard
from flotilla_learner.guard.probes import ProbeResult, start_probes
from flotilla_learner.journal.store import open_journal
from flotilla_learner.types import ModelInfo
from tests.support.fake_ranks import VOCAB_SIZE, FakeRanks
from tests.support.learner import make_config


class SlowRanks(FakeRanks):
    """Compare when they are let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.at_it = 0
        self.most = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def compare_batch(self, batch: Any, *, diagnose: bool = False) -> Any:
        self.at_it += 1
        self.most = max(self.most, self.at_it)
        self.begun.set()
        # A rank continues too, even if its caller is gone.
        await asyncio.shield(asyncio.ensure_future(self.go_on.wait()))
        self.at_it -= 1
        return await super().compare_batch(batch, diagnose=diagnose)


@asynccontextmanager
async def probing(
    tmp_path: Path,
) -> AsyncGenerator[tuple[MismatchGuard, SlowRanks, list[ProbeResult]]]:
    """A guard before the first step, and right answers to its probes."""
    journal = open_journal(tmp_path / "run")
    ranks = SlowRanks(tmp_path / "weights")
    policy = PolicyConfig(model="m", dtype="float32", max_model_len=128)
    guard = MismatchGuard(
        make_config(tmp_path), policy, ranks, journal, tmp_path / "run", run_epoch=1, state={}
    )
    guard.note_model(ModelInfo(parameters=16, vocab_size=VOCAB_SIZE, step=0))
    probes = guard.probes_for(await ranks.publish_weights(0))
    answer = ProbeResult(np.arange(3, dtype=np.int32), np.full(3, -1.0, np.float32))
    yield guard, ranks, [answer] * len(probes)
    await journal.close()


async def test_a_report_without_answers_waits_for_no_comparison(tmp_path: Path) -> None:
    async with probing(tmp_path) as (guard, ranks, results):
        judged = asyncio.create_task(guard.probes_agree("w", PolicyId(1, 0), results))
        await ranks.begun.wait()
        assert await asyncio.wait_for(guard.probes_agree("other", PolicyId(1, 0), []), 5)
        ranks.go_on.set()
        assert await judged


async def test_a_report_that_is_given_up_and_made_again_waits_for_its_first_comparison(
    tmp_path: Path,
) -> None:
    async with probing(tmp_path) as (guard, ranks, results):
        given_up = asyncio.create_task(guard.probes_agree("w", PolicyId(1, 0), results))
        await ranks.begun.wait()
        given_up.cancel()
        again = asyncio.create_task(guard.probes_agree("w", PolicyId(1, 0), results))
        await asyncio.sleep(0.05)
        ranks.go_on.set()
        assert await again
        assert ranks.most == 1
        await asyncio.gather(given_up, return_exceptions=True)


def test_prompts_have_no_id_that_is_never_sampled() -> None:
    policy = PolicyConfig(model="m", dtype="float32", max_model_len=128)
    plain = start_probes(policy, 40, 1.0)
    used = set(np.concatenate([probe.prompt_token_ids for probe in plain]).tolist())
    banned = sorted(used)[3:7]
    probes = start_probes(policy, 40, 1.0, banned)
    assert not np.isin(np.concatenate([p.prompt_token_ids for p in probes]), banned).any()
    assert [len(p.prompt_token_ids) for p in probes] == [len(p.prompt_token_ids) for p in plain]
