"""ReportUnit and PushLogs over the wire: their refusals, and the forms of these."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.rpc import service_error, to_seconds
from flotilla_launcher.agent_protocol import EXIT_PREEMPTED
from flotilla_launcher.state import Replica
from flotilla_launcher.store.log_spool import MAX_CHUNK_BYTES
from tests.support.watched_machine import WatchedMachine, machine


def report(here: WatchedMachine, **fields: Any) -> registry_pb.ReportUnitRequest:
    who: dict[str, Any] = {"run_id": here.run_id, "service": "rollout", "replica": 0}
    who |= {"incarnation": "a", "phase": registry_pb.UNIT_PHASE_RUNNING, **fields}
    return registry_pb.ReportUnitRequest(**who)


def push(here: WatchedMachine, **fields: Any) -> registry_pb.PushLogsRequest:
    who: dict[str, Any] = {"run_id": here.run_id, "service": "rollout", "replica": 0}
    who |= {"incarnation": "a", **fields}
    return registry_pb.PushLogsRequest(**who)


async def refusal(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found = service_error(caught.value)
    assert found is not None
    return found


async def test_a_report_renews_the_lease_until_another_has_the_replica(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path, lease_s=7.0) as here:
        registry = here.served.registry
        answer = await registry.ReportUnit(report(here))
        assert (to_seconds(answer.lease), answer.begun) == (7.0, False)
        assert answer.command == registry_pb.COMMAND_NONE
        await registry.ReportUnit(report(here, incarnation="b"))
        refused = await refusal(registry.ReportUnit(report(here)))
        assert (refused.code, refused.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "REPLACED",
        )
        refused = await refusal(registry.ReportUnit(report(here, run_id="other")))
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_RUN")


async def test_a_log_is_appended_to_where_it_is_known_and_nowhere_else(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        registry = here.served.registry
        for _ in range(2):
            assert (await registry.PushLogs(push(here, chunk=b"one\n"))).position == 4
        refused = await refusal(registry.PushLogs(push(here, position=9, chunk=b"three\n")))
        assert (refused.reason, refused.metadata["position"]) == ("LOG_GAP", "4")
        assert here.log() == "one\n"
        refused = await refusal(registry.PushLogs(push(here, chunk=b"x" * (MAX_CHUNK_BYTES + 1))))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_LOG")
        for service in ("../../elsewhere", "stranger"):
            refused = await refusal(registry.PushLogs(push(here, service=service)))
            assert refused.reason == "BAD_LOG"
        for name in ("../rollout-x", "rollout-0", "rollout-node-1", "learner-x"):
            refused = await refusal(registry.PushLogs(push(here, beside=name)))
            assert refused.reason == "BAD_LOG"
        refused = await refusal(registry.PushLogs(push(here, run_id="../other")))
        assert refused.reason == "UNKNOWN_RUN"


async def test_the_last_words_of_a_log_come_after_the_end_of_its_run(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        here.release()
        here.supervisor.request_stop(0.0)
        await here.served.ended(here.run_id)
        await here.served.registry.PushLogs(push(here, chunk=b"too late for the run\n"))
        assert here.log() == "too late for the run\n"


async def test_a_replica_that_has_lost_its_machine_has_used_up_no_restart(tmp_path: Path) -> None:
    async with machine(tmp_path, max_restarts=0) as here:

        def replica() -> Replica:
            return here.supervisor.run.replicas["rollout", 0]

        for lost in range(1, 4):
            exited = report(here, incarnation=f"{lost}", exit_code=EXIT_PREEMPTED)
            exited.phase = registry_pb.UNIT_PHASE_EXITED
            await here.served.registry.ReportUnit(exited)
            # SkyPilot reports that its job has failed.
            here.backend.finish_unit(here.backend.list_running("rollout")[0], code=1)
            await here.until(lambda again=lost: replica().restarts == again and replica().is_live)
        assert replica().failures == ()
        here.backend.finish_unit(here.backend.list_running("rollout")[0], code=1)
        await here.until(lambda: here.supervisor.run.is_ending)
        assert "gave up after 1 failure" in here.supervisor.run.error
        here.release()
