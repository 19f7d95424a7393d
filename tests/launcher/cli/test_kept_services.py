import os
import signal
from pathlib import Path

import psutil
import pytest

from services.common.healthcheck import check_health
from services.common.process.python_command import python_command
from services.launcher.cli import kept_services as kept
from services.launcher.cli.kept_services import KeptService, kept_services
from services.launcher.cli.terminal import CommandError
from tests.support.free_ports import free_address
from tests.support.waiting import until


def _make_service(folder: Path, *words: str) -> KeptService:
    address = free_address()
    return KeptService(
        name="the child",
        command=python_command("-m", "tests.support.health_child", "--listen", address, *words),
        address=address,
        log=folder / "logs" / "child.log",
        inherits=(),
        secrets={"PYTHONPATH": os.pathsep.join(("gen", "."))},
    )


def _children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if "tests.support.health_child" in each.cmdline()
    ]


async def test_services_serve_during_the_block_and_end_with_it(tmp_path: Path) -> None:
    service = _make_service(tmp_path)

    async with kept_services([service, _make_service(tmp_path)], print) as keeping:
        assert await check_health(service.address, None, 5.0) == ""
        assert len(_children()) == 2
        assert not keeping.done()

    assert _children() == []


async def test_a_service_that_is_killed_serves_again_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_FIRST_WAIT_S", 0.05)
    service, shown = _make_service(tmp_path), list[str]()

    async with kept_services([service], shown.append):
        (first,) = _children()
        first.send_signal(signal.SIGKILL)
        await until(lambda: shown[-1:] == ["the child serves again"])
        (second,) = _children()
        assert await check_health(service.address, None, 5.0) == ""

    assert shown[0] == "the child ended with code -9; it is started again in 0.05 s"
    assert second.pid != first.pid


async def test_a_service_that_does_not_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(CommandError, match=r"(?s)the child ended with code 1; .*this is why"):
        async with kept_services([_make_service(tmp_path, "--fail", "1")], print):
            pytest.fail("it serves")

    assert _children() == []
