"""RegistryService over a socket, with the tests as the services of a run."""

import asyncio
from pathlib import Path
from typing import Any

import grpc

from flotilla.launcher.v1 import registry_service_pb2, run_service_pb2
from flotilla_common.rpc.rpc import to_seconds
from tests.contract.test_run_service import refusal, units, wish
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import ServedLauncher, serving

PB = registry_service_pb2


def who(run_id: str, service: str = "rollout", replica: int = 0, name: str = "a") -> dict[str, Any]:
    return {"run_id": run_id, "service": service, "replica": replica, "incarnation": name}


async def register(served: ServedLauncher, identity: dict[str, Any], port: int = 1) -> Any:
    request = PB.RegisterRequest(**identity, address=f"127.0.0.1:{port}", pid=1)
    return await served.registry.Register(request)


async def beat(served: ServedLauncher, identity: dict[str, Any], *, serving: bool = True) -> int:
    request = PB.HeartbeatRequest(**identity, phase="serving", serving=serving)
    return (await served.registry.Heartbeat(request)).command


class PeerWatch:
    """Reads a stream of peers in the background."""

    def __init__(self, served: ServedLauncher, run_id: str, service: str) -> None:
        request = PB.ResolvePeersRequest(run_id=run_id, service=service)
        self._stream: Any = served.registry.ResolvePeers(request)

    async def next(self) -> list[tuple[str, str]]:
        message: Any = await asyncio.wait_for(self._stream.read(), 5.0)
        return [(peer.address, peer.incarnation) for peer in message.peers]

    def cancel(self) -> None:
        self._stream.cancel()


async def test_peers_are_those_that_serve_and_every_change_is_sent(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish(launcher={"backoff_s": 60.0}))
        [unit] = await units(backend, "env_gateway")
        watch = PeerWatch(served, run_id, "env_gateway")
        assert await watch.next() == []
        gateway = who(run_id, "env_gateway")
        answer = await register(served, gateway, 11)
        assert to_seconds(answer.heartbeat_interval) == 0.1
        assert to_seconds(answer.orphan_after) == 60.0
        assert await beat(served, gateway, serving=False) == PB.COMMAND_NONE
        assert await beat(served, gateway) == PB.COMMAND_NONE
        assert await watch.next() == [("127.0.0.1:11", "a")]
        backend.finish_unit(unit, 1)
        assert await watch.next() == [], "a dead process is no peer"
        heir = who(run_id, "env_gateway", name="b")
        await register(served, heir, 12)
        await beat(served, heir)
        assert await watch.next() == [("127.0.0.1:12", "b")]
        watch.cancel()


async def test_the_page_of_the_run_that_its_learner_reports_is_kept_and_announced_once(
    tmp_path: Path,
) -> None:
    url = "https://wandb.ai/team/project/runs/1"
    async with serving(tmp_path, FakeBackend()) as served:
        run_id = await served.start(wish())
        learner = who(run_id, "learner")
        await register(served, learner)
        for given in ("", url, url, "", f"{url}\x1b[2J"):
            request = PB.HeartbeatRequest(**learner, serving=True, tracker_url=given)
            await served.registry.Heartbeat(request)
        stored = served.launcher.get_run(run_id)
        events = served.launcher.store.list_events(run_id, 0)
    assert stored.run.tracker_url == url
    texts = [event.body["text"] for event in events if event.kind == "message"]
    assert texts.count(f"metrics: {url}") == 1


async def test_a_new_incarnation_replaces_the_old_which_must_exit(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        run_id = await served.start(wish())
        old, new = who(run_id, name="old"), who(run_id, name="new")
        await register(served, old)
        await register(served, old)
        await beat(served, old)
        await register(served, new, 2)
        expected = (grpc.StatusCode.FAILED_PRECONDITION, "REPLACED")
        assert (await refusal(beat(served, old)))[:2] == expected
        assert (await refusal(register(served, old)))[:2] == expected
        assert await beat(served, new) == PB.COMMAND_NONE


async def test_a_drained_replica_is_notified_and_is_no_peer_any_more(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.stubborn = True
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish(launcher={"rollout": {"replicas": 2}}))
        await units(backend, "rollout")
        for replica in (0, 1):
            identity = who(run_id, replica=replica, name=f"r{replica}")
            await register(served, identity, replica)
            await beat(served, identity)
        watch = PeerWatch(served, run_id, "rollout")
        assert len(await watch.next()) == 2
        scale = run_service_pb2.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=1)
        await served.runs.ScaleService(scale)
        await served.until(run_id, lambda r: any(p.state == "draining" for p in r.replicas))
        assert await beat(served, who(run_id, replica=1, name="r1")) == PB.COMMAND_DRAIN
        assert await watch.next() == [("127.0.0.1:0", "r0")]
        assert await beat(served, who(run_id, replica=0, name="r0")) == PB.COMMAND_NONE
        watch.cancel()
        backend.stubborn = False
        for unit in backend.list_running("rollout"):
            backend.finish_unit(unit)


async def test_a_helper_started_by_hand_is_a_peer_and_goes_with_the_run(tmp_path: Path) -> None:
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(wish())
        await units(backend, "rollout")
        helper = who(run_id, replica=77, name="by-hand")
        await register(served, helper, 77)
        assert await beat(served, helper) == PB.COMMAND_NONE
        backend.stubborn = True
        request = run_service_pb2.StopRunRequest(run_id=run_id)
        request.grace.FromMilliseconds(600)
        stopping = asyncio.ensure_future(served.runs.StopRun(request))
        await served.until(run_id, lambda r: r.state == run_service_pb2.RUN_STATE_DRAINING)
        assert await beat(served, helper) == PB.COMMAND_DRAIN
        await stopping


async def test_who_is_not_of_an_active_run_is_turned_away(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend()) as served:
        expected = (grpc.StatusCode.NOT_FOUND, "UNKNOWN_RUN")
        assert (await refusal(register(served, who("stranger"))))[:2] == expected
        run_id = await served.start(wish())
        code, reason, message = await refusal(beat(served, who(run_id)))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_REPLICA")
        assert "register first" in message
