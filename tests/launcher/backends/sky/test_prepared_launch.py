"""Results of requests for machines: one, none now, none ever, or another group's first."""

import asyncio

import pytest

from services.launcher.backends.ports import BackendError, CapacityError, SetupError
from services.launcher.backends.sky.backend import SkyBackend
from services.launcher.backends.sky.status import JobStage
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT
from tests.launcher.backends.sky.starting import STATIC, brief, group
from tests.support import sky_launches
from tests.support.fake_sky import FakeSky


async def test_no_replica_joins_a_group_whose_learner_is_ending(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, _ = await group(backend)
    sky.put(learner.name, status="CANCELLING")
    with pytest.raises(CapacityError, match="no learner yet"):
        await backend.start_replica(brief((ROLLOUT, 0), patience_s=0.2))
    sky.put(learner.name, status="FAILED")
    await group(backend)
    await backend.start_replica(brief((ROLLOUT, 0)))
    assert sky.job(learner.name).job_id == 2


async def test_who_joins_a_group_that_ends_just_now_comes_with_the_next(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, _ = await group(backend)
    sky.refusal, sky.before_refusal = (
        BackendError("no such group"),
        lambda: sky.put(learner.name, status="FAILED"),
    )
    joining = asyncio.create_task(backend.start_replica(brief((ROLLOUT, 0))))
    await asyncio.sleep(0.1)
    assert sky.refusal is None and not joining.done()
    await group(backend)
    assert sky.job((await joining).name).goes_on
    sky.refusal, sky.before_refusal = BackendError("a wrong wish"), None
    with pytest.raises(BackendError, match="a wrong wish") as caught:
        await backend.start_replica(brief((ROLLOUT, 0)))
    assert type(caught.value) is BackendError


async def test_a_group_without_machines_is_given_up_for_the_next_candidate(
    sky: FakeSky, backend: SkyBackend
) -> None:
    # It finds no machine and sleeps.
    sky.status, sky.requested = "PENDING", True
    starts = [backend.start_replica(brief(key)) for key in STATIC]
    failed = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(each) for each in failed] == [CapacityError, CapacityError]
    assert {job.status for job in sky.table} == {"CANCELLED"}


async def test_a_machine_that_never_comes_is_no_capacity(sky: FakeSky, backend: SkyBackend) -> None:
    await group(backend)
    sky.status = "STARTING"
    with pytest.raises(CapacityError):
        await backend.start_replica(brief((ROLLOUT, 0), patience_s=0.2))
    assert sky.job(sky.attempts[-1]["name"]).over


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("FAILED_NO_RESOURCE", CapacityError),
        ("FAILED_PRECHECKS", BackendError),
        ("FAILED_SETUP", SetupError),
    ],
)
async def test_why_a_start_failed_decides_whether_it_is_tried_again(
    sky: FakeSky, backend: SkyBackend, status: str, error: type[Exception]
) -> None:
    await group(backend)
    sky.status = status
    with pytest.raises(BackendError) as caught:
        await backend.start_replica(brief((ROLLOUT, 0)))
    assert type(caught.value) is error


async def test_each_attempt_tries_another_candidate_first(
    sky: FakeSky, backend: SkyBackend
) -> None:
    await group(backend)
    await backend.start_replica(brief((ROLLOUT, 0), attempt=2))
    wish = sky.attempts[0]["resources"]["ordered"]
    assert wish[0]["infra"] == "lambda/us-west-1"


async def test_a_rollout_waits_for_its_learner_and_not_for_ever(backend: SkyBackend) -> None:
    with pytest.raises(CapacityError, match="no learner yet"):
        await backend.start_replica(brief((ROLLOUT, 0), patience_s=0.2))


async def test_a_missing_secret_is_named_before_a_machine_is_requested(
    sky: FakeSky, backend: SkyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    spec = {"env_gateway": {"backend": "fleet"}}
    with pytest.raises(BackendError, match="needs FLEET_API_KEY on its machine; export"):
        await backend.start_replica(brief((GATEWAY, 0), spec=spec))
    assert sky.table == []


async def test_a_job_that_waits_for_its_turn_has_not_failed(
    sky: FakeSky, backend: SkyBackend
) -> None:
    await group(backend)
    sky.status, sky.requested = "PENDING", False
    starting = asyncio.create_task(backend.start_replica(brief((ROLLOUT, 0))))
    await asyncio.sleep(0.2)
    assert not starting.done()
    sky.put(sky.attempts[0]["name"], status="RUNNING", submitted=True, started=True)
    unit = await starting
    # Its machine was taken away, and there is no other yet.
    sky.put(unit.name, status="PENDING")
    assert await backend.attach_replica(brief((ROLLOUT, 0)), unit)
    assert sky.job(unit.name).stage is JobStage.RECOVERING


async def test_a_rollout_whose_group_finds_no_machines_comes_with_the_nextgroup(
    sky: FakeSky, backend: SkyBackend
) -> None:
    sky.status = "STARTING"
    starting = asyncio.create_task(backend.start_replica(brief((ROLLOUT, 0))))
    learner, gateway = (asyncio.create_task(backend.start_replica(brief(key))) for key in STATIC)
    while not sky.attempts:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    sky.put(sky.submitted[0][1]["name"], status="PENDING")
    with pytest.raises(CapacityError):
        await learner
    with pytest.raises(CapacityError):
        await gateway
    sky.put(sky.attempts[0]["name"], status="CANCELLED")
    sky.status = "RUNNING"
    await group(backend)
    assert (await starting).name == sky.attempts[0]["name"]
    assert len(sky.attempts) == 2


async def test_a_group_tries_one_candidate_in_each_further_attempt(
    sky: FakeSky, backend: SkyBackend
) -> None:
    wish = {"ordered": [{"infra": "lambda/us-east-1"}, {"infra": "lambda/us-west-1"}]}
    settings = sky_launches.config(commit="HEAD", learner=wish)
    for attempt in (1, 2, 3):
        await backend.start_replica(sky_launches.launch((LEARNER, 0), settings, attempt=attempt))
        sky.put(sky.submitted[-1][1]["name"], status="FAILED")
    first, second, third = (documents[1]["resources"] for documents in sky.submitted)
    assert [each["infra"] for each in first["ordered"]] == ["lambda/us-east-1", "lambda/us-west-1"]
    assert (second["infra"], third["infra"]) == ("lambda/us-west-1", "lambda/us-east-1")
