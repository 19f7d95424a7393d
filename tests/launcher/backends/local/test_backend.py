"""Runs of real processes: fake services under a real launcher on the local backend."""

import signal
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.ports import BackendError, LaunchSpec
from tests.support.launcher import left_running, serving, spec


def states(run: pb.Run, service: str) -> list[str]:
    return [r.state for r in run.replicas if r.service == service]


async def test_a_run_completes_when_its_learner_is_done_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    # Until its rollout serves; otherwise it is stopped while it starts.
    hold = tmp_path / "hold"
    hold.touch()
    async with serving(tmp_path) as served:
        wish = spec(learner={"held_by": str(hold)}, rollout={"litter": True})
        run_id = await served.start(wish)
        await served.until(run_id, lambda r: states(r, "rollout") == ["running"])
        hold.unlink()
        run = await served.ended(run_id)
        assert run.state == pb.RUN_STATE_COMPLETED, run.error
        assert set(states(run, "rollout")) == {"stopped"}
        assert left_running(tmp_path) == []
        log = (tmp_path / run_id / "logs" / "rollout-0.log").read_text()
        assert "hello from rollout-0" in log
        ledger = (tmp_path / "launcher.sqlite").read_bytes()
        assert b"a-token-for-tests" not in ledger


async def test_a_crashed_rollout_is_restarted_and_the_run_continues(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(learner={"steps": 10**6}, rollout={"crash": "once"}))
        await served.until(run_id, lambda r: any(p.restarts for p in r.replicas))
        # The run ends with the last of its replicas, which may not be the rollout.
        await served.until(
            run_id,
            lambda r: r.state == pb.RUN_STATE_RUNNING and states(r, "rollout") == ["running"],
        )


async def test_a_crash_loop_ends_with_the_last_log_lines_in_the_error(tmp_path: Path) -> None:
    wish = spec(launcher={"max_restarts": 2}, rollout={"crash": "always"}, learner={"steps": 9999})
    async with serving(tmp_path) as served:
        run = await served.ended(await served.start(wish))
        assert run.state == pb.RUN_STATE_FAILED
        assert "rollout-0 exited with code 1; gave up after 3 failures" in run.error
        assert "last words: out of luck" in run.error
        assert left_running(tmp_path) == []


async def test_scaling_adds_replicas_and_drains_them_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(learner={"steps": 10**6}))
        scale = pb.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=2)
        await served.runs.ScaleService(scale)
        await served.until(run_id, lambda r: states(r, "rollout") == ["running", "running"])
        scale.replicas = 1
        await served.runs.ScaleService(scale)
        await served.until(run_id, lambda r: states(r, "rollout") == ["running", "stopped"])
        log = (tmp_path / run_id / "logs" / "rollout-1.log").read_text()
        assert "draining" in log


async def test_a_stop_ends_a_service_that_is_deaf_to_signals(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        wish = spec(learner={"steps": 10**6}, rollout={"deaf": True, "litter": True})
        run_id = await served.start(wish)
        await served.until(run_id, lambda r: r.state == pb.RUN_STATE_RUNNING)
        request = pb.StopRunRequest(run_id=run_id)
        request.grace.FromMilliseconds(800)
        answer = await served.runs.StopRun(request)
        assert answer.state == pb.RUN_STATE_STOPPED
        assert left_running(tmp_path) == []
        assert (await served.runs.StopRun(request)).state == pb.RUN_STATE_STOPPED


async def test_a_stopped_run_is_resumed_where_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(learner={"steps": 12, "step_s": 0.2}))
        steps = tmp_path / run_id / "steps"
        await served.until(run_id, lambda _: steps.exists())
        await served.runs.StopRun(pb.StopRunRequest(run_id=run_id))
        done = int(steps.read_text())
        assert 0 < done < 12
        request = pb.StartRunRequest(request_id="again", resume_run_id=run_id)
        assert (await served.runs.StartRun(request)).run_id == run_id
        run = await served.ended(run_id)
        assert run.state == pb.RUN_STATE_COMPLETED, run.error
        assert int(steps.read_text()) == 12


async def test_a_killed_learner_is_restarted_and_resumes(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(learner={"steps": 15, "step_s": 0.1}))
        steps = tmp_path / run_id / "steps"
        run = await served.until(run_id, lambda r: steps.exists() and steps.read_text() > "1")
        [pid] = [r.pid for r in run.replicas if r.service == "learner"]
        psutil.Process(pid).send_signal(signal.SIGKILL)
        run = await served.ended(run_id)
        assert run.state == pb.RUN_STATE_COMPLETED, run.error
        assert [r.restarts for r in run.replicas if r.service == "learner"] == [1]


async def test_an_evaluation_leaves_the_figures_of_training_as_they_were(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(learner={"steps": 2}))
        trained = await served.ended(run_id)
        assert trained.metrics["reward/avg_pass_at_1"] == 0.5
        again = pb.StartRunRequest(
            request_id="again", resume_run_id=run_id, mode=pb.RUN_MODE_EVAL_ONLY
        )
        await served.runs.StartRun(again)
        evaluated = await served.ended(run_id)
        assert evaluated.mode == pb.RUN_MODE_EVAL_ONLY
        assert dict(evaluated.metrics) == dict(trained.metrics)
        assert (evaluated.step, evaluated.total_steps) == (2, 2)


async def test_each_service_of_a_run_is_scraped_where_the_status_shows(tmp_path: Path) -> None:
    wish = spec(launcher={"metrics": True}, learner={"steps": 10**6}, rollout={"crash": "once"})
    async with serving(tmp_path) as served, httpx.AsyncClient(trust_env=False) as http:
        run_id = await served.start(wish)
        run = await served.until(
            run_id,
            lambda r: (
                any(p.restarts for p in r.replicas) and {p.state for p in r.replicas} == {"running"}
            ),
        )
        addresses = {f"{each.service}": each.metrics_address for each in run.replicas}
        assert len(set(addresses.values())) == 3
        for service, address in addresses.items():
            answer = await http.get(f"http://{address}/metrics")
            families = text_string_to_metric_families(answer.text)
            assert "flotilla_rpc_seconds" in {family.name for family in families}, service


async def test_no_service_serves_metrics_unless_the_spec_has_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        run_id = await served.start(spec(learner={"steps": 10**6}))
        run = await served.until(run_id, lambda r: {p.state for p in r.replicas} == {"running"})
        assert {each.metrics_address for each in run.replicas} == {""}


async def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    launch = LaunchSpec("run-1", ("rollout", 0), ("/no/such/program",), {}, tmp_path / "log")
    with pytest.raises(BackendError, match="/no/such/program"):
        await LocalBackend(tmp_path).start_replica(launch)
