"""SkyRL's Tinker server, started once for all tests of a session."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import URLError

import pytest

from flotilla_common.rpc.free_ports import free_port
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

_SKYRL = ROOT / "build/skyrl"
_UV = ROOT / ".venv/bin/uv"
_BACKEND = {"max_lora_adapters": 8, "max_lora_rank": 8}
# It imports for long, and compiles at each first call.
_START_S = 600.0
_END_S = 60.0


@pytest.fixture(scope="session")
def skyrl_url(engine_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not (_SKYRL / ".installed").exists():
        pytest.skip("SkyRL is not installed: make test-skyrl")
    state = tmp_path_factory.mktemp("skyrl")
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = {
        "base-model": str(engine_folder),
        "backend": "jax",
        "backend-config": json.dumps(_BACKEND),
        "checkpoints-base": str(state / "checkpoints"),
        "database-url": f"sqlite:///{state}/tinker.db",
        "host": "127.0.0.1",
        "port": str(port),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    # It starts its engine with the `uv run` that it was started with itself.
    command = [str(_UV), "run", "--no-project", "--offline", "--python", str(_SKYRL / "bin/python")]
    path = f"{_UV.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with (
        (state / "log").open("w") as log,
        subprocess.Popen(
            [*command, "-m", "skyrl.tinker.api", *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            wait_until(lambda: _answers(url), _START_S, lambda: (state / "log").read_text()[-2000:])
            yield url
        finally:
            process.terminate()
            process.wait(_END_S)


def _answers(url: str) -> bool:
    try:
        with closing(urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5)):
            return True
    except (URLError, OSError):
        return False
