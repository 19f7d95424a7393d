"""Replicas on two Slurm nodes that SkyPilot finds: a learner whose ranks join, and a rollout whose
engine does. They train and leave nothing."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.state import LEARNER, ROLLOUT
from tests.sky.session import SkySession
from tests.sky.test_whole_run import check_gone
from tests.sky.whole_run import UP_S, Site, launched, materials, spec, started

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]
NODES = "flotilla_learner.ranks"
ENGINE_NODES = "flotilla_rollout.nodes"
# Long enough for a look at the nodes.
STEPS = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    sky_session: SkySession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Site]:
    folder = tmp_path_factory.mktemp("multinode")
    with materials(sky_session) as made:
        async with launched(sky_session, folder, made) as served:
            yield served


async def test_a_learner_on_two_nodes_trains_and_leaves_nothing(site: Site) -> None:
    wish = spec(site)
    wish["learner"]["steps"] = STEPS
    wish["launcher"]["sky"]["learner"]["num_nodes"] = 2
    run = await started(site, wish)
    first = await run.serving(LEARNER)
    [second] = [node for node, services in run.working().items() if NODES in services]
    assert first != second
    # Of several, a node has only its ranks: the service itself runs once.
    assert "flotilla_learner" in run.working()[first]
    assert "flotilla_learner" not in run.working()[second]
    ended = await run.ended()
    assert ended.outcome == pb.OUTCOME_COMPLETED
    await check_gone(run, ended)
    assert run.log("learner-0").count('"event": "step"') == STEPS
    assert '"event": "the service ended"' in run.log("learner-node-1")


@pytest.mark.timeout(3600)
async def test_a_rollout_on_two_nodes_samples_with_one_engine_and_leaves_nothing(
    site: Site,
) -> None:
    wish = spec(site)
    wish["learner"]["steps"] = 3
    del wish["launcher"]["modules"]
    wish["launcher"]["start_timeout_s"] = 1800.0
    wish["launcher"]["sky"]["rollout"]["num_nodes"] = 2
    wish["rollout"]["engine"] = {"device": "cpu", "tensor_parallel": 2, "max_num_seqs": 16}
    run = await started(site, wish)
    # Machines, and then vLLM on two nodes that have the same two cores.
    first = await run.serving(ROLLOUT, limit_s=3 * UP_S)
    [second] = [node for node, services in run.working().items() if ENGINE_NODES in services]
    assert first != second
    # Of several, a node has only its workers: the service itself runs once.
    assert "flotilla_rollout" in run.working()[first]
    assert "flotilla_rollout" not in run.working()[second]
    ended = await run.ended()
    assert ended.outcome == pb.OUTCOME_COMPLETED
    await check_gone(run, ended)
    assert run.log("learner-0").count('"event": "step"') == 3
    assert '"event": "the service ended"' in run.log("rollout-0-node-1")
    # One worker on each: their lines come from both.
    assert run.log("rollout-0-node-0-worker-0")
    assert run.log("rollout-0-node-1-worker-0")
