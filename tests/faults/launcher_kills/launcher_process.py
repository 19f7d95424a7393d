"""A launcher of its own process whose machines are in a folder: `RUNS CLOUD [gate-seconds]`."""

import asyncio
import sys
from pathlib import Path

from services.common import log
from services.launcher.__main__ import Options, alone, serve
from services.launcher.control.budget import meter
from services.launcher.ports import Hooks, Intent
from tests.faults.launcher_kills.file_cloud import FileCloud


def main() -> None:
    runs, cloud = Path(sys.argv[1]), Path(sys.argv[2])

    async def gate(intent: Intent) -> tuple[str, ...]:
        while (cloud / "hold").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return ()

    log.setup("launcher", "")
    with alone(runs) as alone_here:
        assert alone_here
        backends = {"local": lambda: FileCloud(cloud)}
        options = Options(
            runs=runs,
            listen="127.0.0.1:0",
            advertise=None,
            idle_exit=None,
            backends=backends,
            hooks=Hooks(gate=gate, meter=meter),
        )
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
