"""Tests' access to the emulated cloud, and the emulator as a process on the login host."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.sky.box import BoxError, Layout
from tests.sky.box.layout import LOGIN, ROOT
from tests.sky.box.namespaces import entered
from tests.sky.catalog import LAMBDA_REGIONS
from tests.sky.offline import cloud_url

_START_S = 20.0


class Cloud:
    """The emulator: its faults, and its own list of machines, which cannot be falsified."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (
            entered(self.layout.namespace(LOGIN)),
            (self.layout.log / "cloud.out").open("a") as log,
        ):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.sky.lambda_cloud"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BoxError(f"the emulated cloud did not start: see {log.name}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the emulator, which takes its machines with it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_START_S)
            self._process = None

    def answers(self) -> bool:
        try:
            self._send()
        except OSError:
            # No emulator, or no box.
            return False
        return True

    def machines(self) -> list[dict[str, Any]]:
        """Return the machines that are billed now: `id`, `name`, `ip`, `status`, `region`,
        `instance_type`."""
        return self._send()["machines"]

    def calls(self) -> list[str]:
        """The paths of the POST requests so far."""
        return self._send()["calls"]

    def set_capacity(self, left: int, *regions: str) -> None:
        """Limit the machines that these regions can still give; all regions when none is named."""
        self._send({"capacity": dict.fromkeys(regions or LAMBDA_REGIONS, left)})

    def set_boot_delay(self, seconds: float) -> None:
        """Delay the next machines until they become active."""
        self._send({"boot_delay_s": seconds})

    def set_away(self, away: bool) -> None:
        """While away, the cloud's API hangs up on all callers; machines continue to run."""
        self._send({"away": away})

    def set_broken(self, broken: bool) -> None:
        """While broken, the cloud's API answers every call with a server error."""
        self._send({"broken": broken})

    def failed(self, address: str) -> int:
        """Count the calls from this address that got no answer or a server error."""
        return self._send()["failed"].count(address)

    def put_right(self) -> list[dict[str, Any]]:
        """End all faults and all machines; return the machines that a test has left."""
        left = self.machines()
        everywhere = dict.fromkeys(LAMBDA_REGIONS, 4)
        self._send({"away": False, "broken": False, "boot_delay_s": 0.5, "capacity": everywhere})
        for machine in left:
            self.preempt(machine["id"])
        self.set_capacity(4)
        return left

    def files_of(self, identity: str) -> Path:
        """The root folder of a machine that has booted."""
        return self.layout.base / "machines" / f"vm-{identity[:8]}" / "root"

    def preempt(self, identity: str) -> None:
        """Take a machine away without a notice."""
        self._send({"preempt": identity})

    def _send(self, wish: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if wish is None else json.dumps(wish).encode()
        with entered(self.layout.namespace(LOGIN)):
            request = urllib.request.Request(f"{cloud_url(self.layout)}/_emulator", data)
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
