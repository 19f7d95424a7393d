"""Costs of real runs of fake services at a launcher: queried, watched, limited."""

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc.rpc import service_error
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.ports import LaunchSpec, ResourceOffer
from flotilla_launcher.control import budget, cost_tracker
from flotilla_launcher.ports import LauncherHooks
from tests.support.launcher import serving, spec

HOOKS = LauncherHooks(meter=budget.meter_cost)
DOLLARS_PER_HOUR = 3600.0


class DearBackend(LocalBackend):
    """This machine, at a dollar a second for each process."""

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        return ResourceOffer("this machine", dollars_per_hour=DOLLARS_PER_HOUR)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count often: a test does not wait for a minute."""
    monkeypatch.setattr(cost_tracker, "EVERY_S", 0.1)


async def test_a_run_of_which_one_hour_is_too_dear_does_not_start(tmp_path: Path) -> None:
    async with serving(tmp_path, DearBackend(tmp_path), hooks=HOOKS) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.start(spec(launcher={"max_cost": 10_799.0}))
        reason = service_error(caught.value)
        assert reason is not None and reason.reason == "BAD_SPEC"
        assert "launcher.max_cost: one hour costs $10,800.00" in reason.message
        assert not (await served.runs.ListRuns(pb.ListRunsRequest())).runs


async def test_a_run_reports_its_cost_to_watchers_and_the_learner(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, DearBackend(tmp_path), hooks=HOOKS) as served:
        wish = spec(
            learner={"steps": 20, "step_s": 0.1}, launcher={"max_cost": 20_000.0, "max_hours": 2.0}
        )
        run_id = await served.start(wish)
        running = pb.RUN_STATE_RUNNING
        await served.until(run_id, lambda run: run.state == running and run.cost.accrued > 0.1)
        cost = (await served.get(run_id)).cost
        each = 2 * DOLLARS_PER_HOUR
        assert cost.estimated_by_service == dict.fromkeys(cost.accrued_by_service, each)
        supervisor = served.launcher.get_supervisor(run_id)
        assert supervisor is not None
        (learner,) = [m for m in supervisor.roster.serving_members("learner")]
        beat = registry_pb.HeartbeatRequest(
            run_id=run_id,
            service="learner",
            incarnation=learner.incarnation,
            serving=True,
            metrics={budget.TRAJECTORIES_METRIC: 100.0},
        )
        reported = (await served.registry.Heartbeat(beat)).metrics
        assert reported["cost/per_hour"] == 3 * DOLLARS_PER_HOUR
        assert reported["cost/per_1000_trajectories"] == pytest.approx(
            10 * reported["cost/accrued"]
        )
        run = await served.ended(run_id)
        assert run.cost.max_cost == 20_000.0
        assert set(run.cost.accrued_by_service) == {"learner", "rollout", "env_gateway"}
        assert sum(run.cost.accrued_by_service.values()) == pytest.approx(run.cost.accrued)
        assert run.cost.per_hour == 0.0
        request = pb.WatchRunRequest(run_id=run_id)
        events = [event async for event in served.runs.WatchRun(request)]
        amounts = [e.cost.accrued for e in events if e.WhichOneof("what") == "cost"]
        assert amounts == sorted(amounts) and amounts[-1] == run.cost.accrued


async def test_each_time_that_a_replica_has_other_machines_it_costs_what_those_do(
    tmp_path: Path,
) -> None:
    prices = {"a": 7200.0, "b": 1800.0}

    class Moving(DearBackend):
        async def price_per_hour(self, launch: LaunchSpec) -> float | None:
            return prices[where]

    async with serving(tmp_path, Moving(tmp_path), hooks=HOOKS) as served:
        run_id = await served.start(spec(learner={"steps": 1_000, "step_s": 0.1}))
        await served.until(run_id, lambda run: run.cost.per_hour == 3 * DOLLARS_PER_HOUR)
        for where, price in prices.items():
            report = registry_pb.ReportUnitRequest(
                run_id=run_id,
                service="rollout",
                incarnation=where,
                hostname=where,
                phase=registry_pb.UNIT_PHASE_RUNNING,
            )
            await served.registry.ReportUnit(report)
            together = 2 * DOLLARS_PER_HOUR + price
            await served.until(run_id, lambda run, all_=together: run.cost.per_hour == all_)
        await served.runs.StopRun(pb.StopRunRequest(run_id=run_id))
        events = served.runs.WatchRun(pb.WatchRunRequest(run_id=run_id))
        notes = [event.message async for event in events if event.message]
        assert [note for note in notes if "an hour" in note] == [
            "rollout-0 costs $7,200.00 an hour",
            "rollout-0 costs $1,800.00 an hour",
        ]


async def test_a_run_that_reaches_its_budget_is_warned_of_drained_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No budget that a test can spend covers an hour.
    monkeypatch.setattr(budget, "check_budget", lambda *_: None)
    async with serving(tmp_path, DearBackend(tmp_path), hooks=HOOKS) as served:
        run_id = await served.start(
            spec(learner={"steps": 1_000, "step_s": 0.1}, launcher={"max_cost": 4.0})
        )
        run = await served.ended(run_id)
        assert (run.state, run.outcome) == (pb.RUN_STATE_STOPPED, pb.OUTCOME_BUDGET)
        assert run.cleanup == pb.CLEANUP_VERIFIED
        assert 4.0 <= run.cost.accrued < 12.0
        request = pb.WatchRunRequest(run_id=run_id)
        notes = [event.message async for event in served.runs.WatchRun(request) if event.message]
        assert len([note for note in notes if "80% of launcher.max_cost" in note]) == 1
        assert len([note for note in notes if "launcher.max_cost is reached" in note]) == 1


async def test_a_run_whose_time_is_up_is_stopped(tmp_path: Path) -> None:
    async with serving(tmp_path, hooks=HOOKS) as served:
        wish = spec(learner={"steps": 1_000, "step_s": 0.1}, launcher={"max_hours": 2 / 3600})
        run = await served.ended(await served.start(wish))
        assert (run.state, run.outcome) == (pb.RUN_STATE_STOPPED, pb.OUTCOME_DEADLINE)


async def test_a_launcher_that_resumes_a_run_counts_on_from_what_was_spent(
    tmp_path: Path,
) -> None:
    wish = spec(learner={"steps": 5, "step_s": 0.1})
    async with serving(tmp_path, DearBackend(tmp_path), hooks=HOOKS) as served:
        run_id = await served.start(wish)
        first = (await served.ended(run_id)).cost.accrued
    async with serving(tmp_path, DearBackend(tmp_path), hooks=HOOKS) as served:
        assert (await served.get(run_id)).cost.accrued == first
        changed = spec(learner={"steps": 8, "step_s": 0.1})
        await served.start(changed, resume_run_id=run_id)
        assert (await served.ended(run_id)).cost.accrued > first


def billed(most: int, **launcher: Any) -> dict[str, Any]:
    """A spec of a run that a Tinker service bills, up to `most` tokens."""
    return spec(
        learner={"engine": "tinker", "steps": 100_000, "step_s": 0.05, "tokens": 100},
        rollout={"tokens": 1_000},
        launcher={"max_tokens": most, **launcher},
    )


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-for-tests")


@pytest.mark.usefixtures("key")
async def test_tokens_of_killed_and_resumed_processes_add_up_to_a_limit_that_drains_the_run(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, hooks=HOOKS) as served:
        prices = {"prompt": 1.0, "sample": 2.0, "train": 3.0}
        run_id = await served.start(billed(40_000, token_prices=prices))
        run = await served.until(run_id, lambda run: run.cost.tokens.sampled >= 4_000)
        (rollout,) = [each for each in run.replicas if each.service == "rollout"]
        os.kill(rollout.pid, signal.SIGKILL)
        run = await served.ended(run_id)
        assert any(replica.restarts for replica in run.replicas)
        assert (run.state, run.outcome) == (pb.RUN_STATE_STOPPED, pb.OUTCOME_BUDGET)
        used = run.cost.tokens
        assert used.prompt == used.sampled > 0 and used.trained > 0
        assert 40_000 <= used.prompt + used.sampled + used.trained < 80_000
        dollars = (used.prompt * 1.0 + used.sampled * 2.0 + used.trained * 3.0) / 1e6
        assert run.cost.accrued_by_service["tokens"] == pytest.approx(dollars)
        request = pb.WatchRunRequest(run_id=run_id)
        events = [event async for event in served.runs.WatchRun(request)]
        counts = [e.cost.tokens.sampled for e in events if e.WhichOneof("what") == "cost"]
        assert counts == sorted(counts) and counts[-1] == used.sampled
        notes = [event.message for event in events if event.message]
        assert len([note for note in notes if "80% of launcher.max_tokens" in note]) == 1
        assert len([note for note in notes if "launcher.max_tokens is reached" in note]) == 1
    async with serving(tmp_path, hooks=HOOKS) as served:
        assert (await served.get(run_id)).cost.tokens == used
        with pytest.raises(grpc.aio.AioRpcError, match=r"launcher.max_tokens: .* are used"):
            await served.start(billed(40_000), resume_run_id=run_id)
        await served.start(billed(120_000), resume_run_id=run_id)
        resumed = (await served.ended(run_id)).cost
        every = resumed.tokens.prompt + resumed.tokens.sampled + resumed.tokens.trained
        assert 120_000 <= every < 160_000
        # They have no price any more.
        assert resumed.accrued == run.cost.accrued
