"""A whole run, from StartRun to the proof that nothing is left: the real launcher, SkyPilot, Slurm
nodes, watchers and services, under TLS. Only these differ from a rented machine:

- The rollouts that scale and die play a script in place of vLLM, and compute logprobs from the
  weights that they were sent: one vLLM takes a minute of both cores to start, and those tests start
  four engines on five nodes that have the same two cores.
- vLLM itself serves the run of one rollout that ends by itself.

The tests of one run build upon each other, in the order of this file.
"""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc.tls import Tls, channel_credentials
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.security import certificates
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, SERVICES
from tests.sky.session import SkySession
from tests.sky.whole_run import UP_S, Site, WholeRun, launched, materials, spec, started
from tests.support.canary import Canaries
from tests.support.every_rpc import of_service, refusals

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]
MODULES = {
    GATEWAY: "flotilla_env_gateway",
    LEARNER: "flotilla_learner",
    ROLLOUT: "tests.faults.rollout_with_small_engine",
}
RPCS = {
    GATEWAY: of_service("EpisodeService"),
    LEARNER: of_service("GroupService", "PolicyService"),
    ROLLOUT: of_service("RolloutService"),
}
# By how it differs from the run of the other tests. vLLM has weights to load and graphs to compile.
SMALL: dict[str, Any] = {}
VLLM: dict[str, Any] = {
    "max_generate_length": 16,
    "engine": {"kind": "vllm", "device": "cpu", "max_num_seqs": 4},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    sky_session: SkySession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Site]:
    folder = tmp_path_factory.mktemp("whole")
    with materials(sky_session) as made:
        async with launched(sky_session, folder, made) as served:
            yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(site: Site) -> WholeRun:
    return await started(site, spec(site))


async def test_replicas_on_nodes_of_their_own_train_under_tls(whole: WholeRun) -> None:
    nodes = {service: await whole.serving(service) for service in SERVICES}
    assert whole.working().keys() == set(nodes.values())
    assert len(set(nodes.values())) == len(SERVICES)
    for service, node in nodes.items():
        assert {"flotilla_launcher.agent", MODULES[service]} <= set(whole.working()[node])
    await whole.until(lambda _: whole.steps() >= 2)
    for replica in (await whole.get()).replicas:
        await check_refuses_strangers(whole, replica.service, replica.address)
    check_shows_no_secret(whole)


def check_shows_no_secret(run: WholeRun) -> None:
    """SkyPilot's database and files, here and on the nodes, and the public output of `ps`."""
    minted, layout = Canaries(), run.session.layout
    minted.values = {}
    minted.add_minted(run.runs, run.run_id)
    assert {f"the TLS key of {service}" for service in SERVICES} < minted.values.keys()
    assert minted.on_command_lines() == {}
    for folder in (layout.client, layout.home, layout.log):
        assert minted.in_files(folder, kept=False) == {}


async def check_refuses_strangers(run: WholeRun, service: str, address: str) -> None:
    """Check that callers without the run's certificate or token are refused, at every rpc."""
    member = certificates.load_identity(run.runs, run.run_id)
    assert member is not None
    of_another = certificates.mint_identity(run.run_id).tls_for(ROLLOUT)
    for opened, token, code in (
        (grpc.aio.insecure_channel(address), member.token, grpc.StatusCode.UNAVAILABLE),
        (dial(address, service, of_another), member.token, grpc.StatusCode.UNAVAILABLE),
        (dial(address, service, member.tls_for(ROLLOUT)), "other", grpc.StatusCode.UNAUTHENTICATED),
    ):
        async with opened as channel:
            codes = await refusals(channel, RPCS[service], token=token)
        assert codes == dict.fromkeys((each.path for each in RPCS[service]), code)


def dial(address: str, service: str, shown: Tls) -> grpc.aio.Channel:
    options = [
        ("grpc.ssl_target_name_override", shown.name_of(service)),
        # Otherwise it would share the connection of an accepted caller.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.secure_channel(address, channel_credentials(shown), options=options)


async def test_its_pages_are_read_by_ssh_on_its_learners_node(
    whole: WholeRun, tmp_path: Path
) -> None:
    await whole.serving(LEARNER)
    page = await whole.bundle_pages(tmp_path / "pages.zip")
    assert "running" in page
    assert not (whole.runs / whole.run_id / JOURNAL_FILE).exists()


async def test_a_second_rollout_takes_part_and_leaves_again(whole: WholeRun) -> None:
    await whole.serving(ROLLOUT)
    await whole.scale(2)
    node = await whole.serving(ROLLOUT, 1)
    assert MODULES[ROLLOUT] in whole.working()[node]
    await whole.until(lambda _: "rollout-1" in {worker for worker, _ in whole.trained_by()})
    # At once: SkyPilot may not yet have reported the start.
    await whole.scale(1)
    await whole.until(lambda _: "the service ended" in whole.log("rollout-1"))
    await whole.until(lambda run: whole.replica(run, ROLLOUT, 1).state == "stopped", UP_S)
    await whole.until(lambda _: node not in whole.working() and len(whole.allocations()) == 3)
    done = whole.steps()
    await whole.until(lambda _: whole.steps() >= done + 2)


async def test_a_rollout_whose_node_dies_comes_back_on_another(whole: WholeRun) -> None:
    node, box = await whole.serving(ROLLOUT), whole.session.box
    before = whole.trained_by()
    box.kill_node(node)
    assert node not in whole.working()
    await whole.until(lambda _: bool(_rollouts(whole) - before), UP_S)
    box.revive_node(node)
    await whole.serving(ROLLOUT, but=node)
    run = await whole.get()
    assert [whole.replica(run, each, 0).restarts for each in (LEARNER, GATEWAY)] == [0, 0]
    assert whole.log("learner-0").count('"event": "serving"') == 1, "it was not disturbed"


def _rollouts(run: WholeRun) -> set[tuple[str, str]]:
    return {each for each in run.trained_by() if each[0] == "rollout-0"}


async def test_a_launcher_that_is_killed_has_a_successor_and_no_replica_notices(
    site: Site, whole: WholeRun
) -> None:
    for service in SERVICES:
        await whole.serving(service)
    services, machines, done = whole.working(), whole.allocations(), whole.steps()
    restarts = [replica.restarts for replica in (await whole.get()).replicas]
    await site.kill()
    await site.up()
    await whole.until(lambda _: whole.steps() >= done + 2)
    run = await whole.get()
    assert run.state == pb.RUN_STATE_RUNNING
    assert (whole.working(), whole.allocations()) == (services, machines)
    assert [replica.restarts for replica in run.replicas] == restarts
    assert whole.log("learner-0").count('"event": "serving"') == 1, "it was not disturbed"


async def test_a_learner_whose_node_is_lost_resumes_elsewhere_from_what_it_uploaded(
    whole: WholeRun,
) -> None:
    node, box = await whole.serving(LEARNER), whole.session.box
    await whole.until(lambda _: whole.uploaded() >= 2)
    box.kill_node(node)
    whole.lose_disk()
    kept = whole.uploaded()
    await whole.until(lambda _: whole.restored() == [kept], UP_S)
    box.revive_node(node)
    await whole.serving(LEARNER, but=node)
    await whole.until(lambda _: whole.steps() >= kept + 2, UP_S)
    assert whole.replica(await whole.get(), GATEWAY, 0).restarts == 0


async def test_a_stopped_run_leaves_nothing(whole: WholeRun) -> None:
    await whole.serving(LEARNER)
    ended = await whole.stop()
    assert (ended.state, ended.outcome) == (pb.RUN_STATE_STOPPED, pb.OUTCOME_STOPPED)
    await check_gone(whole, ended)
    assert "the service ended" in whole.log("learner-0"), "it was not drained"


async def check_gone(run: WholeRun, ended: pb.Run) -> None:
    assert ended.cleanup == pb.CLEANUP_VERIFIED, ended.cleanup_detail
    # SkyPilot has requested their end from Slurm, which leaves them some seconds.
    for _ in range(30):
        if not run.allocations() and not run.leftovers():
            break
        await asyncio.sleep(1.0)
    assert (run.allocations(), run.leftovers()) == ([], {})
    sky = SkyClient()
    assert await sky.list_clusters() == []
    assert run.nodes() == {"idle"}
    assert certificates.load_identity(run.runs, run.run_id) is None


@pytest.mark.parametrize("rollout", [VLLM, SMALL], ids=["vllm", "small"])
async def test_a_run_that_has_all_its_steps_leaves_nothing(
    site: Site, rollout: dict[str, Any], tmp_path: Path
) -> None:
    wish = spec(site)
    wish["learner"]["steps"] = 2
    wish["rollout"] |= rollout
    if rollout:
        wish["launcher"]["modules"] = {}
    run = await started(site, wish)
    ended = await run.ended()
    assert ended.outcome == pb.OUTCOME_COMPLETED
    await check_gone(run, ended)
    page = await run.bundle_pages(tmp_path / "pages.zip")
    assert "finished" in page, "from its store"
    assert run.log("learner-0").count('"event": "step"') == 2
    assert ("vLLM" in run.log("rollout-0")) == bool(rollout)
