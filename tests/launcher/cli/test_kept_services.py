import signal
from pathlib import Path

import pytest

from flotilla_common.healthcheck import check_health
from flotilla_launcher.cli import kept_services as kept
from flotilla_launcher.cli.kept_services import kept_services
from flotilla_launcher.cli.terminal import CommandError
from tests.support.health_children import health_children, make_health_child
from tests.support.waiting import until


async def test_services_serve_during_the_block_and_end_with_it(tmp_path: Path) -> None:
    service = make_health_child(tmp_path)

    async with kept_services([service, make_health_child(tmp_path)], print) as keeping:
        assert await check_health(service.address, None, 5.0) == ""
        assert len(health_children()) == 2
        assert not keeping.done()

    assert health_children() == []


async def test_a_service_that_is_killed_serves_again_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_FIRST_WAIT_S", 0.05)
    service, shown = make_health_child(tmp_path), list[str]()

    async with kept_services([service], shown.append):
        (first,) = health_children()
        first.send_signal(signal.SIGKILL)
        await until(lambda: shown[-1:] == ["the child serves again"])
        (second,) = health_children()
        assert await check_health(service.address, None, 5.0) == ""

    assert shown[0] == "the child ended with code -9; it is started again in 0.05 s"
    assert second.pid != first.pid


async def test_a_service_that_does_not_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(CommandError, match=r"(?s)the child ended with code 1; .*this is why"):
        async with kept_services([make_health_child(tmp_path, "--fail", "1")], print):
            pytest.fail("it serves")

    assert health_children() == []
