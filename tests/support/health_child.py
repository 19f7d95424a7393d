"""A service that serves its health only, for tests of programs that keep services:
`python -m tests.support.health_child --listen HOST:PORT [--fail CODE]`."""

import asyncio
import signal
import sys

from flotilla_common.rpc import rpc


async def _serve(listen: str) -> None:
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    async with rpc.serving(rpc.server(token="a" * 32), listen) as serving:
        serving.set_serving(True)
        await end.wait()


def main() -> None:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    if "--fail" in given:
        sys.stderr.write("this is why\n")
        raise SystemExit(int(given["--fail"]))
    asyncio.run(_serve(given["--listen"]))


if __name__ == "__main__":
    main()
