"""The health of a service, as a container engine sees it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from flotilla_common.healthcheck import check_health, main
from flotilla_common.rpc import rpc
from flotilla_common.rpc.tls import TLS_VARIABLE, Tls
from tests.support.echo_service import TOKEN
from tests.support.outsiders import run


async def request(address: str, *options: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of the command itself."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flotilla_common.healthcheck", "--address", address, *options),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode().strip()


async def test_a_service_is_healthy_from_when_it_serves_until_it_drains() -> None:
    async with rpc.serving(rpc.server(token=TOKEN), "127.0.0.1:0") as serving:
        assert await request(serving.address) == (
            1,
            f"{serving.address}: its status is NOT_SERVING",
        )
        serving.set_serving(True)
        nowhere = ("--tls-dir", "/nowhere")
        assert await request(serving.address, *nowhere) == (0, f"{serving.address}: serving")
        serving.set_serving(False)
        assert "NOT_SERVING" in await check_health(serving.address, None, 5.0)
    assert await check_health(serving.address, None, 5.0) == "nothing listens there (any more)"


async def test_under_tls_it_shows_the_services_own_certificate(tmp_path: Path) -> None:
    tls = run().tls_for("learner")
    for name, content in (("ca", tls.ca), ("cert", tls.certificate), ("key", tls.key)):
        (tmp_path / f"{name}.pem").write_bytes(content)
    async with rpc.serving(rpc.server(token=TOKEN), "127.0.0.1:0", tls=tls) as serving:
        serving.set_serving(True)
        message = (0, f"{serving.address}: serving")
        assert await request(serving.address, "--tls-dir", str(tmp_path)) == message
        assert await request(serving.address, **{TLS_VARIABLE: tls.to_text()}) == message


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (None, "wants TLS (--tls-dir)"),
        (run().tls_for("rollout"), "another service of the run answers at this address"),
    ],
)
async def test_who_shows_something_else_learns_why(shown: Tls | None, reason: str) -> None:
    own = run().tls_for("learner")
    async with rpc.serving(rpc.server(token=TOKEN), "127.0.0.1:0", tls=own) as serving:
        serving.set_serving(True)
        assert reason in await check_health(serving.address, shown, 5.0)


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1:50051"])
def test_a_wrong_question_is_distinguished_from_a_service_that_is_ill(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--address", address]) == 2
    assert capsys.readouterr().err.startswith("error: ")
