"""Every service's real process beyond loopback: it serves its run, and no other."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.weight_server import WeightServerConfig
from tests.faults.harness import spec
from tests.faults.nodes import nodes
from tests.support.every_rpc import of_service, refusals
from tests.support.outsiders import beyond_loopback, member, other_run, outsiders, run

SERVICES = {
    "env_gateway": ("EpisodeService",),
    "learner": ("GroupService", "PolicyService"),
    "rollout": ("RolloutService",),
}


async def check_refuses_strangers(address: str, service: str, *names: str) -> None:
    """Every rpc, to every token and every certificate that is not of the run."""
    rpcs = of_service(*names)
    assert rpcs
    for token in (None, "not-the-token-of-this-run", other_run().token):
        async with member(address, service) as channel:
            codes = await refusals(channel, rpcs, token=token)
        assert codes == {rpc.path: grpc.StatusCode.UNAUTHENTICATED for rpc in rpcs}
    for who, opened in outsiders().items():
        async with opened(address, service) as channel:
            codes = await refusals(channel, rpcs, token=run().token)
        assert codes == {rpc.path: grpc.StatusCode.UNAVAILABLE for rpc in rpcs}, who


@pytest.mark.slow
async def test_a_run_of_three_nodes_trains_under_tls_and_refuses_strangers(
    tmp_path: Path, policy: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_TEST_TASKS", str(tasks))
    wish = spec(policy, tasks, steps=2, weights={"network": "public"})
    async with nodes(tmp_path, wish) as started:
        gateway = await started.start("env_gateway")
        learner = await started.start("learner")
        rollout = await started.start(
            "rollout",
            *("--peer", f"learner={learner.address}"),
            *("--peer", f"env_gateway={gateway.address}"),
        )
        for node, service in ((gateway, "env_gateway"), (learner, "learner"), (rollout, "rollout")):
            await check_refuses_strangers(node.address, service, *SERVICES[service])
        assert await asyncio.wait_for(learner.process.wait(), 60) == 0
        assert json.loads((started.folder / "summary.json").read_text())["steps"] == 2


async def test_the_weight_server_refuses_strangers_too(tmp_path: Path) -> None:
    weights = PublicationChild("flotilla_learner.weights.weight_server", tmp_path / "weights.log")
    tls = run().tls_for("learner").to_text()
    try:
        address = await weights.start_process(
            WeightServerConfig(run().run_id, run().token, tls, listen=f"{beyond_loopback()}:0")
        )
        await check_refuses_strangers(address, "learner", "WeightService")
    finally:
        await weights.close()
