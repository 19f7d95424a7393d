"""The address at which other machines of a run reach this one, and the values refused for it."""

import sys
from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.backends.local import own_address
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.local.own_address import find_own_host, route_address
from flotilla_launcher.backends.ports import BackendError, LaunchSpec
from flotilla_launcher.config.launcher import LauncherConfig, ServiceShape
from flotilla_launcher.config.local import LocalConfig
from tests.support.run_specs import bare_spec

PRIVATE = LauncherConfig(local=LocalConfig(network="private"))


def launch(folder: Path, config: LauncherConfig, *words: str) -> LaunchSpec:
    spec = {"learner": {"rank": {"nodes": 2}}}
    return LaunchSpec(
        run_id="a-1",
        key=("learner", 0),
        command=(sys.executable, "-c", "import sys; print(sys.argv[1:])", *words),
        secrets={},
        log=folder / "learner-0.log",
        spec=bare_spec(spec, config),
    )


def test_a_run_of_this_machine_alone_and_one_of_rented_machines_need_no_address() -> None:
    assert find_own_host(LauncherConfig(), {"FLOTILLA_ADDRESS": "nonsense"}) == ""
    rented = LauncherConfig(backend="sky", local=LocalConfig(network="private"))
    assert find_own_host(rented, {}) == ""


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("node1", "FLOTILLA_ADDRESS=node1 is not an IP address"),
        ("127.0.0.1", "no other machine reaches this one there"),
        ("0.0.0.0", "no other machine reaches this one there"),
        ("::1", "no other machine reaches this one there"),
        ("192.0.2.7", "192.0.2.7 is no address of this machine"),
    ],
)
def test_an_address_where_others_do_not_reach_this_machine_is_refused(
    address: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_own_host(PRIVATE, {"FLOTILLA_ADDRESS": address})


def test_without_a_route_the_address_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(own_address, "route_address", unreachable)
    with pytest.raises(ConfigError, match=r"Network is unreachable\); set FLOTILLA_ADDRESS"):
        find_own_host(PRIVATE, {})


@pytest.mark.parametrize(("service", "table"), [("learner", "rank"), ("rollout", "engine")])
async def test_several_machines_are_refused_on_loopback_which_the_others_do_not_reach(
    tmp_path: Path, service: str, table: str
) -> None:
    def wanted(nodes: int) -> LaunchSpec:
        spec = bare_spec({service: {table: {"nodes": nodes}}})
        return LaunchSpec("a-1", (service, 0), (), {}, tmp_path / "log", spec=spec)

    backend = LocalBackend(tmp_path)
    assert await backend.offer_resources(wanted(1))
    with pytest.raises(
        BackendError, match=rf"{service}\.{table}\.nodes = 2.*launcher\.local\.network"
    ):
        await backend.offer_resources(wanted(2))


async def test_one_replica_of_several_machines_is_all_that_this_machine_begins(
    tmp_path: Path,
) -> None:
    def wanted(index: int, replicas: int) -> LaunchSpec:
        config = PRIVATE.model_copy(update={"rollout": ServiceShape(replicas=replicas)})
        spec = bare_spec({"rollout": {"engine": {"nodes": 2}}}, config)
        return LaunchSpec("a-1", ("rollout", index), (), {}, tmp_path / "log", spec=spec)

    backend = LocalBackend(tmp_path)
    with pytest.raises(BackendError, match=r"set launcher\.rollout\.replicas = 1"):
        await backend.offer_resources(wanted(0, 2))
    # As when it is scaled.
    with pytest.raises(BackendError, match=r"rollout\.engine\.nodes = 2"):
        await backend.start_replica(wanted(1, 1))


async def test_a_replica_with_further_machines_listens_where_they_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOTILLA_ADDRESS", raising=False)
    monkeypatch.setattr(own_address, "route_address", lambda: "10.0.0.5")
    backend = LocalBackend(tmp_path)
    for words in ((), ("--listen", "127.0.0.1:0")):
        wanted = launch(tmp_path, PRIVATE, *words)
        await backend.offer_resources(wanted)
        await backend.wait_for_exit(await backend.start_replica(wanted))
    assert (tmp_path / "learner-0.log").read_text().splitlines() == [
        "['--listen', '10.0.0.5:0']",
        "['--listen', '127.0.0.1:0']",
    ]


async def test_a_replica_is_not_started_at_an_address_that_is_another_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_ADDRESS", "192.0.2.7")
    backend = LocalBackend(tmp_path)
    for attempt in (backend.offer_resources, backend.start_replica):
        with pytest.raises(BackendError, match=r"192\.0\.2\.7 is no address of this machine"):
            await attempt(launch(tmp_path, PRIVATE))


def test_the_address_of_the_default_route_is_this_machines() -> None:
    try:
        found = route_address()
    except OSError:
        pytest.skip("this machine has no route to others")
    assert find_own_host(PRIVATE, {"FLOTILLA_ADDRESS": found}) == found
