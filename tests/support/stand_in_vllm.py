"""In place of vLLM's server: a program with its options that serves a model's health on a socket or
at an address, and has an engine, a process of its own. A model named `broken` does not load."""

import os
import subprocess
import sys
import time

from aiohttp import web


async def _be_healthy(_request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    print(f"loading {options['--model']}", flush=True)
    if options["--model"].endswith("broken"):
        print("WARNING this may cause OSError: too many files", file=sys.stderr)
        print("(Worker pid=7) ERROR ValueError: no such model", file=sys.stderr)
        print("RuntimeError: the cause is above", file=sys.stderr, flush=True)
        raise SystemExit(3)
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["FLOTILLA_NOTED"], "w") as file:
        print(os.getpid(), engine.pid, os.environ.get("OPENAI_API_KEY"), *sys.argv, file=file)
    # Longer than the pause between two questions whether it serves.
    time.sleep(0.7)
    app = web.Application()
    app.router.add_get("/health", _be_healthy)
    if "--uds" in options:
        web.run_app(app, path=options["--uds"], print=None)
    else:
        web.run_app(app, host=options["--host"], port=int(options["--port"]), print=None)


if __name__ == "__main__":
    main()
