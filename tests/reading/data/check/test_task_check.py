"""Checks of tasks by a real gateway: planted faults are found, and valid tasks stay valid."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from flotilla_common.domain.task_means import wilson_interval
from flotilla_common.tasks.task_checks import CheckResult, Outcome
from flotilla_common.tasks.task_format import parse_task
from flotilla_launcher.cli.adapters.gateway_player import GatewayPlayer
from flotilla_launcher.cli.adapters.play_gateway import gateway_section, open_gateway
from flotilla_reading.data.check.task_check import check_task
from flotilla_reading.data.check.verdicts import judge_task
from flotilla_reading.play.ports import EpisodePlayer
from flotilla_reading.play.solutions import Solution
from tests.reading.data.check.planted import FAULTS, Made, made, trust
from tests.support.repository import ROOT

SPEC = ROOT / "deploy/runs/local.toml"
ENVS = ("booking", "tracker", "shop")

Checks = dict[str, CheckResult]


async def check_all(given: Sequence[Made], folder: Path) -> list[Checks]:
    """Check tasks with their solutions, each verifier trusted."""
    trust([task for task, _ in given], folder / "digests")
    overrides = [
        "--env_gateway.backend=embedded",
        f"--env_gateway.verifiers.digests={folder}/digests",
    ]
    places = asyncio.Semaphore(4)
    async with open_gateway(SPEC, overrides) as stub:
        player: EpisodePlayer = GatewayPlayer(stub, gateway_section(SPEC, overrides), "test")

        async def check_one(each: Made) -> Checks:
            task, solution = each
            solved = msgspec.convert(solution, Solution)
            async with places:
                return await check_task(player, parse_task(json.dumps(task)), task, solved)

        return list(await asyncio.gather(*(check_one(each) for each in given)))


def verdicts_of(found: Sequence[Checks]) -> list[Outcome]:
    return [judge_task(checks) for checks in found]


async def test_planted_faults_are_found_and_tasks_without_one_are_valid(tmp_path: Path) -> None:
    # Of all kinds: see the slow tests.
    kinds = list(FAULTS)[::3]
    planted = [FAULTS[kind](made(ENVS[n % 3], n)) for n, kind in enumerate(kinds)]
    whole = [made(env, 0) for env in ENVS]
    found = await check_all([*planted, *whole], tmp_path)
    missed = [
        (kind, checks)
        for kind, checks in zip(kinds, found, strict=False)
        if judge_task(checks) is not Outcome.INVALID
    ]
    assert [kind for kind, _ in missed] == [], missed
    assert verdicts_of(found[len(planted) :]) == [Outcome.VALID] * len(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_recall_of_planted_faults_is_high_with_its_interval(tmp_path: Path) -> None:
    planted = [
        (kind, plant(made(env, 10 + n)))
        for n, (kind, plant) in enumerate(FAULTS.items())
        for env in ENVS
    ]
    found = await check_all([each for _, each in planted], tmp_path)
    missed = [
        kind
        for (kind, _), verdict in zip(planted, verdicts_of(found), strict=True)
        if verdict is not Outcome.INVALID
    ]
    recall = 1 - len(missed) / len(planted)
    low, high = wilson_interval(recall, len(planted))
    print(f"recall {recall:.3f} of {len(planted)}, from {low:.3f} to {high:.3f}; missed: {missed}")
    assert recall >= 0.95, missed
    assert low >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_none_of_two_hundred_valid_tasks_is_called_invalid(tmp_path: Path) -> None:
    whole = [made(ENVS[n % 3], n, "heldout" if n % 2 else "train") for n in range(201)]
    found = await check_all(whole, tmp_path)
    assert verdicts_of(found) == [Outcome.VALID] * len(whole)
