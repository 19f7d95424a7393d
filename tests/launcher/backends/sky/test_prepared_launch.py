"""Results of requests for machines: one, none now, or none ever."""

from typing import Any

import pytest

from flotilla_launcher.backends.ports import BackendError, CapacityError, SetupError
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.state import GATEWAY, ROLLOUT
from tests.launcher.backends.sky.starting import brief
from tests.support.skypilot.server import Server
from tests.support.skypilot.state import Script


async def test_a_machine_that_never_comes_is_no_capacity(sky: Server, backend: SkyBackend) -> None:
    sky.script = Script(boot_s=60.0)
    wish = brief((ROLLOUT, 0), patience_s=0.2)
    with pytest.raises(CapacityError, match=r"no machine was ready after 0\.2 s"):
        await backend.start_replica(wish)
    await backend.undo_start(wish)
    assert sky.state.machines == {}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ({"sold_out": 1}, CapacityError),
        ({"broken": "ValueError"}, BackendError),
        ({"setup_fails": True}, SetupError),
        ({"no_login": True}, SetupError),
    ],
)
async def test_why_a_start_failed_decides_whether_it_is_tried_again(
    sky: Server, backend: SkyBackend, script: dict[str, Any], error: type[Exception]
) -> None:
    sky.script = Script(**script)
    with pytest.raises(BackendError) as caught:
        await backend.start_replica(brief((ROLLOUT, 0)))
    assert type(caught.value) is error


async def test_each_attempt_tries_another_candidate_first(sky: Server, backend: SkyBackend) -> None:
    await backend.start_replica(brief((ROLLOUT, 0), attempt=2))
    wish = sky.launched[0]["resources"]["ordered"]
    assert wish[0]["infra"] == "lambda/us-west-1"


async def test_a_missing_secret_is_named_before_a_machine_is_requested(
    sky: Server, backend: SkyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    spec = {"env_gateway": {"backend": "fleet"}}
    with pytest.raises(BackendError, match="needs FLEET_API_KEY on its machine; export"):
        await backend.start_replica(brief((GATEWAY, 0), spec=spec))
    assert sky.state.infras == {}
