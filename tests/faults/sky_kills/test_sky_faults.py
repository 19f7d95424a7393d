"""Faults of SkyPilot and its clouds: they refuse, fail, are away, take machines back."""

import asyncio
import time
from pathlib import Path

import pytest

from flotilla_launcher.state import Outcome, RunState
from tests.faults.sky_kills import phases
from tests.faults.sky_kills.folder import INFRAS, SERVICES, opened

_slow = pytest.mark.slow


@pytest.mark.parametrize("failures", [pytest.param(number, marks=_slow) for number in (1, 2, 3)])
async def test_machines_that_come_at_a_later_attempt_are_those_of_the_next_candidates(
    tmp_path: Path, failures: int
) -> None:
    async with opened(tmp_path) as folder:
        folder.script(sold_out=failures)
        await folder.begin()
        folder.serve()
        await folder.reached(RunState.RUNNING)
        assert folder.machine_requests("learner") == failures + 1
        infras = folder.state.infras[folder.name("learner")]
        assert infras == [INFRAS[i % 2] for i in range(failures + 1)]
        replicas = folder.stored().run.replicas.values()
        assert [(r.restarts, r.failures) for r in replicas] == [(0, ())] * 3
        await folder.stop()
        await folder.gone(Outcome.STOPPED)


@pytest.mark.parametrize("failures", [4, pytest.param(5, marks=_slow)])
async def test_machines_that_never_come_end_the_run_for_want_of_capacity(
    tmp_path: Path, failures: int
) -> None:
    async with opened(tmp_path) as folder:
        folder.script(sold_out=failures)
        await folder.begin()
        run = (await folder.gone(Outcome.CAPACITY)).run
        assert run.state is RunState.FAILED
        assert "found no machine in attempt 4 of 4" in run.error
        assert max(folder.machine_requests(service) for service in SERVICES) == 4


async def test_a_setup_that_fails_is_no_want_of_capacity_and_no_crash(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        folder.script(setup_fails=True)
        await folder.begin(max_restarts=0)
        run = (await folder.gone(Outcome.FAILED)).run
        assert run.state is RunState.FAILED
        assert "setup failed on machine 2 of 2: " in run.error
        assert "setup exited with code 7" in run.error
        assert all(replica.attempt == 1 for replica in run.replicas.values())


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        ("TypeError", "TypeError"),
        pytest.param(
            "sqlalchemy.exc.OperationalError",
            "CloudError: sqlalchemy error (OperationalError)",
            marks=_slow,
        ),
    ],
)
async def test_a_worker_of_the_server_that_is_broken_is_no_wrong_wish(
    tmp_path: Path, broken: str, cause: str
) -> None:
    async with opened(tmp_path) as folder:
        folder.script(broken=broken)
        await folder.begin(backoff_s=0.1)
        folder.serve()
        await folder.reached(RunState.RUNNING)
        assert folder.news("-0 could not be started: ") == 2
        assert folder.news(f"{cause}: 'LazyImport' object is not callable; restart 1 of 5") == 2
        await folder.stop()
        await folder.gone(Outcome.STOPPED)


async def test_a_start_that_a_restart_of_the_server_interrupts_is_repeated(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        folder.script(broken="RequestInterruptedError")
        await folder.begin(max_restarts=0)
        folder.serve()
        await folder.reached(RunState.RUNNING)
        assert [r.restarts for r in folder.stored().run.replicas.values()] == [0, 0, 0]
        assert set(folder.state.most.values()) == {1}
        assert folder.stored().run.unreachable == ""
        await folder.stop()
        await folder.gone(Outcome.STOPPED)


@_slow
async def test_a_machine_without_login_is_given_back_and_not_requested_for_ever(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        folder.script(no_login=True)
        await folder.begin()
        run = (await folder.gone(Outcome.FAILED)).run
        assert "setup failed on machine 2 of 2: " in run.error
        assert "Failed to SSH to 10.0.0.1" in run.error
        assert run.unreachable == ""


@pytest.mark.parametrize(
    "phase",
    [
        phases.training,
        pytest.param(phases.submitting, marks=_slow),
        pytest.param(phases.booting, marks=_slow),
    ],
)
async def test_a_server_that_is_gone_for_a_while_ends_nothing(
    tmp_path: Path, phase: phases.Phase
) -> None:
    async with opened(tmp_path) as folder:
        await phase(folder)
        before = set(folder.machines())
        await folder.down()
        await folder.until(lambda: folder.stored().run.unreachable != "")
        await asyncio.sleep(2.0)
        assert "SkyPilot's API server does not answer" in (await folder.get()).unreachable
        assert set(folder.machines()) == before
        assert not folder.stored().run.is_ending
        await folder.up()
        folder.serve()
        await folder.until(lambda: folder.stored().run.unreachable == "")
        await folder.reached(RunState.RUNNING)
        assert before <= set(folder.machines())
        assert set(folder.state.most.values()) == {1}
        assert [r.restarts for r in folder.stored().run.replicas.values()] == [0, 0, 0]
        await folder.stop()
        await folder.gone(Outcome.STOPPED)


@_slow
async def test_a_run_that_is_stopped_while_the_server_is_gone_ends_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await phases.training(folder)
        folder.obedient = False
        await folder.down()
        stopping = asyncio.create_task(folder.stop(0.5))
        await asyncio.sleep(2.0)
        stored = folder.stored().run
        assert stored.is_ending and not stored.state.has_ended and len(folder.machines()) == 3
        await folder.up()
        await stopping
        await folder.gone(Outcome.STOPPED)


async def test_a_launcher_that_must_go_while_the_server_is_gone_leaves_the_run_to_the_next(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await phases.training(folder)
        await folder.down()
        await folder.until(lambda: folder.stored().run.unreachable != "")
        begun = time.monotonic()
        assert folder.process is not None
        folder.process.terminate()
        await asyncio.sleep(0.2)
        # Once more: it shall not wait for the replicas to drain.
        folder.process.terminate()
        assert await folder.process.wait() == 0
        assert time.monotonic() - begun < 20
        assert folder.stored().run.state is RunState.DRAINING and len(folder.machines()) == 3
        await folder.up()
        await folder.launch()
        await folder.gone(Outcome.STOPPED)


@_slow
async def test_a_machine_that_is_taken_away_comes_back_and_the_others_never_know(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await phases.training(folder)
        before = folder.stored().run.replicas
        folder.post("preempt", cluster=folder.name("rollout"), notice=False)
        await folder.until(lambda: len(folder.machines()) == 2)
        await folder.until(lambda: len(folder.machines()) == 3)
        requests = [folder.machine_requests(service) for service in SERVICES]
        assert requests == [1, 1, 2]
        await folder.until(lambda: folder.has_machine("rollout"))
        after = folder.stored().run.replicas
        for key in (("learner", 0), ("env_gateway", 0)):
            assert after[key] == before[key]
        # A preemption is no failure.
        assert after["rollout", 0].failures == ()
        await folder.stop()
        await folder.gone(Outcome.STOPPED)


@_slow
async def test_a_learner_for_which_there_is_no_other_machine_is_requested_until_there_is_one(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await folder.begin()
        await folder.until(lambda: all(map(folder.has_machine, SERVICES)))
        folder.script(recovers=False)
        folder.post("preempt", cluster=folder.name("learner"), notice=False)
        await folder.until(lambda: folder.machine_requests("learner") == 3)
        assert folder.news("learner-0 found no machine in attempt 1 of 4") == 1
        folder.script(recovers=True)
        await folder.until(lambda: all(map(folder.has_machine, SERVICES)))
        replicas = folder.stored().run.replicas.values()
        assert [(r.service, r.restarts, r.failures) for r in replicas] == [
            ("env_gateway", 0, ()),
            ("learner", 1, ()),
            ("rollout", 0, ()),
        ]
        assert len(folder.machines()) == 3 and set(folder.state.most.values()) == {1}
        await folder.stop(0.5)
        await folder.gone(Outcome.STOPPED)


@_slow
async def test_a_run_whose_time_is_up_is_drained_and_leaves_no_machine(tmp_path: Path) -> None:
    async with opened(tmp_path) as folder:
        await folder.begin(max_hours=4 / 3600)
        folder.serve()
        run = (await folder.gone(Outcome.DEADLINE)).run
        assert run.state is RunState.STOPPED
        assert "launcher.max_hours is reached" in run.error


async def test_what_machines_cost_while_no_launcher_is_there_may_use_up_the_budget(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as folder:
        await folder.begin(max_cost=12_000.0)
        folder.serve()
        await folder.reached(RunState.RUNNING)
        await folder.until(lambda: folder.stored().run.cost.per_hour == 3 * 3600.0)
        await folder.kill()
        # As if it had been away for two hours.
        metered = "json_extract(run_json, '$.metered') - 7200"
        folder.ledger_write(
            f"UPDATE runs SET run_json = json_set(run_json, '$.metered', {metered})"
        )
        await folder.launch()
        run = (await folder.gone(Outcome.BUDGET)).run
        assert run.state is RunState.STOPPED
        assert "launcher.max_cost is reached" in run.error
        assert run.cost.accrued == pytest.approx(3 * 7200.0, rel=0.01)
        assert run.cost.per_hour == 0.0
