"""RunService over a socket, on a backend in memory."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from flotilla.launcher.v1 import registry_service_pb2, run_service_pb2
from flotilla_common.rpc.rpc import service_error
from flotilla_launcher.state import Unit
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import ServedLauncher, serving, spec

ACCEPTING = {s: "tests.support.accepting_service" for s in ("learner", "rollout", "env_gateway")}


def wish(**sections: Any) -> dict[str, Any]:
    launcher = {"modules": ACCEPTING, **sections.pop("launcher", {})}
    return spec(launcher=launcher, **sections)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = service_error(caught.value)
    assert error is not None
    assert error.domain == "launcher.flotilla"
    return error.code, error.reason, error.message


async def units(backend: FakeBackend, service: str) -> list[Unit]:
    """The units of a service, once there are any."""
    for _ in range(500):
        if backend.list_running(service):
            return backend.list_running(service)
        await asyncio.sleep(0.01)
    raise AssertionError(f"{service} was never started")


async def report(served: ServedLauncher, run_id: str, service: str, phase: str = "serving") -> int:
    """Register and beat as replica 0 of a service, and return the command."""
    who: dict[str, Any] = {
        "run_id": run_id,
        "service": service,
        "replica": 0,
        "incarnation": f"{service}-x",
    }
    await served.registry.Register(
        registry_service_pb2.RegisterRequest(**who, address="127.0.0.1:9", pid=1)
    )
    beat = registry_service_pb2.HeartbeatRequest(
        **who, phase=phase, serving=True, step=3, total_steps=9, metrics={"reward/avg": 0.5}
    )
    return (await served.registry.Heartbeat(beat)).command


async def test_a_plan_names_commands_without_secrets_and_starts_nothing(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        text = json.dumps(wish(launcher={"rollout": {"replicas": 3}}))
        answer = await served.runs.PlanRun(run_service_pb2.PlanRunRequest(spec_json=text))
        planned = {p.service: p for p in answer.services}
        assert planned["rollout"].replicas == 3
        assert "--registry" in planned["learner"].command
        assert len(answer.spec_sha256) == 32
        assert "a-token" not in str(answer)
        assert backend.launches == []
        listed = await served.runs.ListRuns(run_service_pb2.ListRunsRequest())
        assert listed.runs == []


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{", "the spec is not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({**spec(), "lerner": {}}), "did you mean 'learner'"),
        (json.dumps(wish(launcher={"max_restart": 1})), "did you mean 'max_restarts'"),
        (json.dumps(wish(launcher={"rollout": {"replicas": 0}})), "rollout.replicas"),
        (json.dumps(wish(learner={"refuse": "steps: missing"})), "learner.steps: missing"),
    ],
)
async def test_a_bad_spec_is_refused_with_the_key_and_the_fix(
    tmp_path: Path, bad: str, expected: str
) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        request = run_service_pb2.StartRunRequest(request_id="1", spec_json=bad)
        code, reason, message = await refusal(served.runs.StartRun(request))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_SPEC")
        assert expected in message
        assert (await served.runs.ListRuns(run_service_pb2.ListRunsRequest())).runs == []


async def test_what_the_machine_lacks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.refuse = "requires 8 GPUs, this machine has 0"
    async with serving(tmp_path, backend) as served:
        request = run_service_pb2.StartRunRequest(request_id="1", spec_json=json.dumps(wish()))
        _, reason, message = await refusal(served.runs.StartRun(request))
        assert reason == "BAD_SPEC"
        assert "requires 8 GPUs" in message


async def test_a_repeated_start_is_the_same_run_also_when_both_come_at_once(
    tmp_path: Path,
) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        starts = [served.start(wish(), request_id="same") for _ in range(5)]
        ids = await asyncio.gather(*starts)
        assert len(set(ids)) == 1
        await units(backend, "rollout")
        assert len(backend.launches) == 3
        other = json.dumps(wish(seed=1))
        request = run_service_pb2.StartRunRequest(request_id="same", spec_json=other)
        code, reason, _ = await refusal(served.runs.StartRun(request))
        assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT")


async def test_runs_started_in_the_same_second_have_ids_of_their_own(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        ids = [await served.start(wish()) for _ in range(3)]
        assert len(set(ids)) == 3
        listed = await served.runs.ListRuns(run_service_pb2.ListRunsRequest())
        assert [run.run_id for run in listed.runs] == sorted(ids, key=ids.index, reverse=True)
        assert all(run.spec_json == "" for run in listed.runs)


async def test_a_watch_sends_everything_once_and_resumes_where_it_was(
    tmp_path: Path,
) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend, stream_age_s=0.4) as served:
        run_id = await served.start(wish())
        await units(backend, "learner")
        for service in ("env_gateway", "rollout", "learner"):
            await report(served, run_id, service)
        seen = await watch(served, run_id, 0)
        assert [event.event for event in seen] == list(range(1, len(seen) + 1))
        states = [e.state for e in seen if e.WhichOneof("what") == "state"]
        assert states[0] == run_service_pb2.RUN_STATE_PREFLIGHT
        assert states[-1] == run_service_pb2.RUN_STATE_RUNNING
        [progress] = [e.progress for e in seen if e.WhichOneof("what") == "progress"]
        assert (progress.step, progress.total_steps) == (3, 9)
        assert progress.metrics == {"reward/avg": 0.5}
        middle = seen[len(seen) // 2].event
        again = await watch(served, run_id, middle)
        assert again == seen[len(seen) // 2 + 1 :]


async def watch(served: ServedLauncher, run_id: str, after: int) -> list[Any]:
    """All events until the stream has reached its age."""
    request = run_service_pb2.WatchRunRequest(run_id=run_id, after_event=after)
    events: list[Any] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for event in served.runs.WatchRun(request):
            events.append(event)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return events


async def test_a_watch_of_a_run_that_ends_ends_with_its_last_state(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish())
        [learner] = await units(backend, "learner")
        await report(served, run_id, "learner", phase="done")
        backend.finish_unit(learner, 0)
        request = run_service_pb2.WatchRunRequest(run_id=run_id)
        events = [event async for event in served.runs.WatchRun(request)]
        assert events[-1].state == run_service_pb2.RUN_STATE_COMPLETED
        run = await served.get(run_id)
        assert run.HasField("end_time")
        assert backend.cleaned == [run_id]
        names = [unit.name.rpartition("/")[2] for unit in backend.drained]
        assert names == ["rollout-0", "env_gateway-0"]


async def test_an_evaluation_notifies_the_learner_and_keeps_the_spec(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish(), mode=run_service_pb2.RUN_MODE_EVAL_ONLY)
        await units(backend, "learner")
        commands = {launch.key[0]: launch.command for launch in backend.launches}
        assert commands["learner"][-1] == "--learner.mode=eval"
        assert "--learner.mode=eval" not in commands["rollout"]
        assert "mode" not in json.loads((await served.get(run_id)).spec_json).get("learner", {})


async def test_only_a_run_that_has_ended_and_is_not_complete_is_resumed(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish())
        [learner] = await units(backend, "learner")
        again = run_service_pb2.StartRunRequest(request_id="2", resume_run_id=run_id)
        code, reason, _ = await refusal(served.runs.StartRun(again))
        assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "RUN_ACTIVE")
        await report(served, run_id, "learner", phase="done")
        backend.finish_unit(learner, 0)
        await served.ended(run_id)
        code, reason, message = await refusal(served.runs.StartRun(again))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE")
        assert "a spec with more steps" in message
        again.spec_json = json.dumps(wish(learner={"steps": 99}))
        assert (await served.runs.StartRun(again)).run_id == run_id
        again.request_id, again.resume_run_id = "3", "missing"
        code, reason, _ = await refusal(served.runs.StartRun(again))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_RUN")


async def test_scaling_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        run_id = await served.start(wish())
        for service, replicas, expected in (
            ("rolout", 2, "no service 'rolout'"),
            ("learner", 2, "learner can have 1 to 1 replicas"),
            ("rollout", 0, "rollout can have 1 to 256 replicas"),
        ):
            request = run_service_pb2.ScaleServiceRequest(
                run_id=run_id, service=service, replicas=replicas
            )
            code, reason, message = await refusal(served.runs.ScaleService(request))
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_SERVICE")
            assert expected in message
        await served.runs.StopRun(run_service_pb2.StopRunRequest(run_id=run_id))
        request = run_service_pb2.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=2)
        code, reason, _ = await refusal(served.runs.ScaleService(request))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "RUN_ENDED")


async def test_log_lines_come_once_from_a_position_and_as_they_are_written(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        run_id = await served.start(wish())
        log = tmp_path / run_id / "logs" / "rollout-0.log"
        log.parent.mkdir()
        log.write_text("".join(f"line {i}\n" for i in range(100)))
        request = run_service_pb2.TailLogsRequest(run_id=run_id, service="rollout", lines=2)
        lines = [line async for line in served.runs.TailLogs(request)]
        assert [line.line for line in lines] == ["line 98", "line 99"]
        assert lines[0].source == "rollout-0"
        request.after_bytes["rollout-0"] = lines[0].after_bytes
        assert [line.line async for line in served.runs.TailLogs(request)] == ["line 99"]
        request.follow = True
        request.after_bytes["rollout-0"] = lines[1].after_bytes
        followed = asyncio.create_task(_collect(served, request))
        await asyncio.sleep(0.1)
        with log.open("a") as file:
            file.write("half a line")
            file.flush()
            await asyncio.sleep(0.3)
            file.write(", then the rest\n")
        await served.runs.StopRun(run_service_pb2.StopRunRequest(run_id=run_id))
        assert await followed == ["half a line, then the rest"]


async def _collect(served: ServedLauncher, request: Any) -> list[str]:
    return [line.line async for line in served.runs.TailLogs(request)]


async def test_many_at_once_all_get_their_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        run_id = await served.start(wish())
        runs = await asyncio.gather(*(served.get(run_id) for _ in range(100)))
        assert {run.run_id for run in runs} == {run_id}


async def test_a_second_launcher_resumes_what_a_dead_one_left(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish())
        await units(backend, "rollout")
        # The first launcher is frozen here, as if dead, while a second takes over its folder.
        heir = FakeBackend()
        async with serving(tmp_path, heir) as second:
            assert await second.launcher.recover_runs() == []
            before = (await served.get(run_id)).replicas
            run = await second.get(run_id)
            assert [replica.pid for replica in run.replicas] == [r.pid for r in before]
            assert heir.launches == [], "nothing is started that runs"
            resume = run_service_pb2.StartRunRequest(request_id="2", resume_run_id=run_id)
            assert (await refusal(second.runs.StartRun(resume)))[1] == "RUN_ACTIVE"
            for service in ("env_gateway", "learner", "rollout"):
                await report(second, run_id, service)
            await second.until(run_id, lambda r: r.state == run_service_pb2.RUN_STATE_RUNNING)
            [unit] = await units(heir, "rollout")
            heir.finish_unit(unit, 1)
            await second.until(run_id, lambda r: any(p.restarts for p in r.replicas))
            await second.runs.StopRun(run_service_pb2.StopRunRequest(run_id=run_id))
            run = await second.get(run_id)
            assert run.state == run_service_pb2.RUN_STATE_STOPPED
            assert run.outcome == run_service_pb2.OUTCOME_STOPPED
            assert run.cleanup == run_service_pb2.CLEANUP_VERIFIED
            assert heir.cleaned == [run_id]
