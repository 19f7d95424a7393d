"""Specs with hostile commands and paths, and the commands that others become."""

import os
from pathlib import Path

import pytest

from services.common.spec.config import ConfigError
from services.launcher.config.launcher import LauncherConfig
from services.launcher.config.local import LocalConfig
from services.launcher.run_plan import (
    BadSpecError,
    count_machines,
    further_machine_module,
    parse_spec,
    replica_command,
)
from services.launcher.state import RunMode
from tests.support.launcher import serving, spec


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{", '{"name": "x"}', "a: &a [*a]"])
def test_b53_a_spec_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((BadSpecError, ConfigError)):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"learner":' * 2000 + "1" + "}" * 2000, "nested more than 100 deep"),
        ("[" + "[]," * 300_000 + "1]", "more than 65536 values"),
        ('{"name": "a", "name": "b"}', "the key 'name' is repeated"),
        ('{"name": "a", "seed": 1e999}', "1e999 is too large for a number"),
    ],
    ids=["deep", "many", "repeated", "infinite"],
)
def test_a_spec_of_too_much_is_refused_before_it_is_built(text: str, message: str) -> None:
    with pytest.raises(BadSpecError, match=message):
        parse_spec(text)


async def test_b52_a_new_run_never_takes_a_folder_or_link_that_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    async with serving(runs) as served:
        first = await served.start(spec())
        await served.ended(first)
        # Independent of the clock, the next ids are all taken by links to another place.
        base = first.rpartition("-")[0]
        for second in range(60):
            (runs / f"{base}-{int(first[-6:]) + second + 1:06d}").symlink_to(outside)
        run_id = await served.start(spec())
        await served.ended(run_id)
    assert not (runs / run_id).is_symlink()
    assert os.listdir(outside) == []


def command(config: LauncherConfig, service: str) -> list[str]:
    run_dir = Path("/runs/a-1")
    return [*replica_command(config, (service, 0), run_dir, "127.0.0.1:7000", RunMode.TRAIN)]


def test_a_run_of_this_machine_alone_is_on_loopback_without_certificates() -> None:
    for service in ("learner", "env_gateway", "rollout"):
        words = command(LauncherConfig(), service)
        assert words[words.index("--listen") + 1] == "127.0.0.1:0"
        assert "--tls-dir" not in words


def test_a_run_that_other_machines_reach_has_certificates_and_its_gateway_on_loopback() -> None:
    config = LauncherConfig(local=LocalConfig(network="private"))
    for service in ("learner", "env_gateway", "rollout"):
        words = command(config, service)
        assert words[words.index("--tls-dir") + 1] == f"/runs/.identity/a-1/{service}"
        # The backend adds this machine's own address, which it knows.
        assert ("--listen" in words) is (service == "env_gateway")


def test_machines_of_a_replica_are_counted_by_its_services_own_key() -> None:
    several = {"learner": {"rank": {"nodes": 3}}, "rollout": {"engine": {"nodes": 2}}}
    assert [count_machines(several, s) for s in ("learner", "rollout", "env_gateway")] == [3, 2, 1]
    assert count_machines({}, "learner") == 1


def test_further_machines_run_a_module_beside_their_service() -> None:
    named = LauncherConfig(modules={"learner": "mine.learner"})
    assert further_machine_module(LauncherConfig(), "learner") == "services.learner.ranks"
    assert further_machine_module(named, "learner") == "mine.learner.ranks"
    assert further_machine_module(named, "rollout") == "services.rollout.nodes"
