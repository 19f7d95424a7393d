"""SkyPilot's API server on the login host of a box."""

import os
import subprocess
import time
import urllib.request

from tests.sky.box import BoxError, Layout
from tests.sky.box.layout import LOGIN, ROOT
from tests.sky.box.namespaces import entered
from tests.sky.offline import api_url, environment

_START_S = 120.0
_STOP_S = 120.0
_NO_SERVER_HERE = "SKYPILOT_DISABLE_LOCAL_API_SERVER"


class ApiServer:
    """May be stopped and started again: its state lies in SkyPilot's home."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # It starts in the project's root, so that it can import tests.sky.plugin.
        with (
            entered(self.layout.namespace(LOGIN)),
            (self.layout.log / "api-server.out").open("a") as log,
        ):
            self._process = subprocess.Popen(
                ["sky", "api", "start", "--foreground"],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BoxError(f"SkyPilot's API server did not start: see {log.name}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop it as `sky api stop` does: requests are lost, controllers of jobs end and come
        back."""
        with entered(self.layout.namespace(LOGIN)):
            subprocess.run(
                ["sky", "api", "stop"],
                check=False,
                capture_output=True,
                env=self._environment(),
                timeout=_STOP_S,
            )
        self.forget()

    def forget(self) -> None:
        """Forget the process after something else has ended it."""
        if self._process is not None:
            self._process.wait(_STOP_S)
            self._process = None

    def answers(self) -> bool:
        try:
            with (
                entered(self.layout.namespace(LOGIN)),
                urllib.request.urlopen(f"{api_url(self.layout)}/api/health", timeout=2) as answer,
            ):
                return answer.status == 200
        except OSError:
            # No server, or no box.
            return False

    def _environment(self) -> dict[str, str]:
        python_path = f"{ROOT}:{ROOT / 'gen'}"
        # Clients here may start no server, but this is no client.
        inherited = {k: v for k, v in os.environ.items() if k != _NO_SERVER_HERE}
        return {**inherited, **environment(self.layout), "PYTHONPATH": python_path}
