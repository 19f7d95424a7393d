"""HTTP servers that a test writes itself."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving_app(app: web.Application, **options: Any) -> AsyncGenerator[str]:
    """Serve `app`; yield its URL without a trailing slash. `options` are aiohttp's of a runner."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
