"""A launcher of its own process whose machines are in a folder: `RUNS CLOUD [gate-seconds]`."""

import asyncio
import sys
from pathlib import Path

from flotilla_common.telemetry import log
from flotilla_launcher.__main__ import ServeOptions, hold_folder_lock, serve_launcher
from flotilla_launcher.control.budget import meter_cost
from flotilla_launcher.ports import LauncherHooks, PendingRun
from tests.faults.launcher_kills.file_cloud import FileCloud


def main() -> None:
    runs, cloud = Path(sys.argv[1]), Path(sys.argv[2])

    async def gate(intent: PendingRun) -> tuple[str, ...]:
        while (cloud / "hold").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return ()

    log.setup("launcher", "")
    with hold_folder_lock(runs) as alone_here:
        assert alone_here
        backends = {"local": lambda: FileCloud(cloud)}
        options = ServeOptions(
            runs=runs,
            listen="127.0.0.1:0",
            advertise=None,
            idle_exit=None,
            backends=backends,
            hooks=LauncherHooks(gate=gate, meter=meter_cost),
        )
        asyncio.run(serve_launcher(options))


if __name__ == "__main__":
    main()
