"""A launcher of its own process whose machines are SkyPilot's: `RUNS ROOT HOLD`.

The backend is the real one; `sky` is found in tests/support/skypilot/sdk.
"""

import asyncio
import sys
from pathlib import Path

from flotilla_common.telemetry import log
from flotilla_launcher.__main__ import ServeOptions, hold_folder_lock, serve_launcher
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.control.budget import meter_cost
from flotilla_launcher.ports import LauncherHooks, PendingRun


def main() -> None:
    runs, root, hold = (Path(argument) for argument in sys.argv[1:4])

    async def gate(intent: PendingRun) -> tuple[str, ...]:
        while hold.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return ()

    log.setup("launcher", "")
    with hold_folder_lock(runs) as alone_here:
        assert alone_here
        options = ServeOptions(
            runs=runs,
            listen="127.0.0.1:0",
            advertise=None,
            idle_exit=None,
            backends={
                "local": lambda: LocalBackend(runs),
                "sky": lambda: SkyBackend(runs, root, SkyClient(), poll_s=0.1, silent_s=0.5),
            },
            hooks=LauncherHooks(gate=gate, meter=meter_cost),
        )
        asyncio.run(serve_launcher(options))


if __name__ == "__main__":
    main()
