"""A launcher of its own process whose machines are SkyPilot's: `RUNS ROOT HOLD`.

The backend is the real one; `sky` is found in tests/faults/sky_kills/sdk.
"""

import asyncio
import sys
from pathlib import Path

from services.common import log
from services.launcher.__main__ import Options, alone, serve
from services.launcher.backends.local.backend import LocalBackend
from services.launcher.backends.sky.backend import SkyBackend
from services.launcher.backends.sky.sdk import SkyClient
from services.launcher.control.budget import meter
from services.launcher.ports import Hooks, Intent


def main() -> None:
    runs, root, hold = (Path(argument) for argument in sys.argv[1:4])

    async def gate(intent: Intent) -> tuple[str, ...]:
        while hold.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return ()

    log.setup("launcher", "")
    with alone(runs) as alone_here:
        assert alone_here
        options = Options(
            runs=runs,
            listen="127.0.0.1:0",
            advertise=None,
            idle_exit=None,
            backends={
                "local": lambda: LocalBackend(runs),
                "sky": lambda: SkyBackend(runs, root, SkyClient(), poll_s=0.1, gather_s=0.2),
            },
            hooks=Hooks(gate=gate, meter=meter),
        )
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
