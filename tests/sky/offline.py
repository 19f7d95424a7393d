"""SkyPilot's home for a box: unmodified SkyPilot works from it without internet."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.sky.box import BoxError, Layout
from tests.sky.box.files import ssh_client_config
from tests.sky.box.layout import LOGIN
from tests.sky.catalog import write_catalog

CLOUD_PORT = 18080
# SkyPilot sends it as a bearer token, and copies it to every machine that stops itself.
CLOUD_KEY = "emu-key"
_BUILD_WHEEL = "from sky.backends import wheel_utils; wheel_utils.build_sky_wheel()"


def cloud_url(layout: Layout) -> str:
    """Return the address of the cloud's emulator, seen from every host of the box."""
    return f"http://{layout.address(LOGIN)}:{CLOUD_PORT}"


def api_url(layout: Layout) -> str:
    """Return the address of SkyPilot's API server on the login host."""
    return f"http://127.0.0.1:{layout.api_port}"


def environment(layout: Layout) -> dict[str, str]:
    """Return the environment of a process that uses SkyPilot on the login host."""
    return {
        "HOME": str(layout.client),
        "SKYPILOT_API_SERVER_ENDPOINT": api_url(layout),
        "SKYPILOT_API_SERVER_LOCAL_PORT": str(layout.api_port),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "FLOTILLA_LAMBDA_URL": f"{cloud_url(layout)}/api/v1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def write_home(layout: Layout) -> None:
    """A home as of the first day, but for the wheel that SkyPilot builds of itself."""
    home = layout.client
    wheels = home / ".sky/wheels"
    kept = layout.base / "wheels"
    if wheels.exists():
        shutil.rmtree(kept, ignore_errors=True)
        wheels.rename(kept)
    shutil.rmtree(home, ignore_errors=True)
    (home / ".sky").mkdir(parents=True)
    home.chmod(0o700)
    if kept.exists():
        kept.rename(wheels)
    else:
        _build_wheel(layout)
    write_catalog(home)
    _write(home / ".slurm/config", ssh_client_config(layout))
    # JSON is YAML.
    _write(home / ".sky/config.yaml", json.dumps(_config(layout), indent=2))
    _write(home / ".sky/plugins.yaml", json.dumps(_plugins(layout), indent=2))
    _write(home / ".lambda_cloud/lambda_keys", f"api_key = {CLOUD_KEY}\n")


def _config(layout: Layout) -> dict[str, Any]:
    # Each node has a folder of its own there: otherwise two ranks race to make one runtime.
    folders = {"workdir": str(layout.home), "tmpdir": str(layout.node_tmp)}
    prices = {"cpu": 0.04, "memory": 0.005, "accelerators": {layout.gpu.upper(): 2.5}}
    return {
        "allowed_clouds": ["slurm", "lambda"],
        "slurm": {
            "allowed_clusters": [layout.cluster],
            "provision_timeout": 60,
            "pricing": prices,
            "cluster_configs": {layout.cluster: folders},
        },
    }


def _plugins(layout: Layout) -> dict[str, Any]:
    parameters = {"lambda_endpoint": f"{cloud_url(layout)}/api/v1"}
    return {"plugins": [{"class": "tests.sky.plugin.OfflinePlugin", "parameters": parameters}]}


def _build_wheel(layout: Layout) -> None:
    """SkyPilot does this at its first launch, where the tools that it builds with are missing."""
    variables = {**os.environ, **environment(layout)}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD_WHEEL],
        check=False,
        capture_output=True,
        text=True,
        env=variables,
    )
    if done.returncode:
        raise BoxError(f"SkyPilot cannot build its wheel (is pip online?):\n{done.stderr[-2000:]}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
