"""SkyPilot's unmodified provisioner of a cloud against the emulated one, and its failures."""

import http.client
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.sky.offline import CLOUD_KEY, cloud_url
from tests.sky.sdk import launch, logs, until
from tests.sky.session import SkySession

pytestmark = [pytest.mark.sky, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def as_it_was(sky_session: SkySession) -> Iterator[None]:
    yield
    assert sky_session.cloud.put_right() == []


def task(run: str, accelerator: str) -> Any:
    sky = import_module("sky")
    made = sky.Task(name="hello", run=run)
    made.set_resources(sky.Resources(infra="lambda", accelerators=accelerator))
    return made


def status(cluster: str) -> list[Any]:
    """Return SkyPilot's state of a cluster after it has queried the cloud."""
    sky = import_module("sky")
    force = import_module("sky").StatusRefreshMode.FORCE
    return sky.get(sky.status([cluster], refresh=force))


def test_without_capacity_the_next_region_is_taken_and_a_preempted_machine_is_noticed(
    sky_session: SkySession,
) -> None:
    cloud = sky_session.cloud
    cloud.set_capacity(0, "us-east-1", "us-west-1")
    job, _ = launch(task("echo served by $(hostname)", "H100:1"), "elsewhere")
    [machine] = cloud.machines()
    assert machine["region"]["name"] == "us-south-1"
    assert machine["instance_type"]["name"] == "gpu_1x_h100_pcie"
    assert "served by vm-" in logs("elsewhere", job)
    assert len(status("elsewhere")) == 1
    cloud.preempt(machine["id"])
    # Where SkyPilot's own look at the cluster takes too long, it answers with its last state.
    until("the machine is missed", lambda: status("elsewhere") == [])


def test_a_machine_outlives_the_api_server_that_was_booting_it(sky_session: SkySession) -> None:
    """SkyPilot forgets the request: a launcher needs a reaper of its own."""
    sky = import_module("sky")
    cloud = sky_session.cloud
    cloud.set_boot_delay(20)
    sky.launch(task("true", "A10:1"), cluster_name="forgotten")
    until("the machine", lambda: len(cloud.machines()) == 1)
    sky_session.api.stop()
    assert not sky_session.api.answers()
    sky_session.api.start()
    assert len(cloud.machines()) == 1
    sky.get(sky.down("forgotten"))
    assert cloud.machines() == []


def test_a_cloud_that_is_away_answers_only_the_oracle(sky_session: SkySession) -> None:
    cloud = sky_session.cloud
    request = urllib.request.Request(f"{cloud_url(sky_session.layout)}/api/v1/instances")
    request.add_header("Authorization", f"Bearer {CLOUD_KEY}")
    cloud.set_away(True)
    with pytest.raises(http.client.RemoteDisconnected):
        urllib.request.urlopen(request)
    assert cloud.machines() == []
    cloud.set_away(False)
    with urllib.request.urlopen(request) as answer:
        assert answer.read() == b'{"data": []}'
