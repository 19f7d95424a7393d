"""MCP servers over stdio that write without an end, for `benchmarks.hostile_load`.

`python -m benchmarks.hostile_load.stdio_floods EPISODES SECONDS` plays the episodes of each kind of
flood on one event loop, each with a call that waits for so many seconds, and prints as JSON how
long the loop was held."""

import asyncio
import json
import sys
from typing import Any

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.ports import BackendError, ProvisionRequest
from tests.support.fake_gateway import task_json
from tests.support.loop_watch import watched_loop

FLOODS = {
    "stdout_newlines": ("stdout", "\n"),
    "stdout_line": ("stdout", "x"),
    "stdout_braces": ("stdout", "{\n"),
    "stderr_newlines": ("stderr", "\n"),
    "stderr_line": ("stderr", "x"),
}
START_S = 60.0


async def measure_flood(stream: str, text: str, episodes: int, seconds: float) -> dict[str, Any]:
    module = "benchmarks.hostile_load.flooding_server"
    command = (sys.executable, "-m", module, stream, text)
    backend = McpStdioBackend(McpServer(transport="stdio", command=command, shared_state=True))
    try:
        instances = [
            await backend.provision_instance(
                ProvisionRequest(f"flood-{number}", parse_task(task_json()), START_S),
                timeout_s=START_S,
            )
            for number in range(episodes)
        ]
        await asyncio.gather(*(each.list_tools(timeout_s=START_S) for each in instances))
        async with watched_loop() as watch:
            calls = (each.call_tool("flood", {}, timeout_s=seconds) for each in instances)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            await asyncio.gather(*(each.close(timeout_s=seconds) for each in instances))
    finally:
        await backend.close()
    kinds = {end.kind if isinstance(end, BackendError) else repr(end) for end in ends}
    return {"held_ms": round(1e3 * watch.longest_s, 1), "calls": sorted(kinds)}


async def measure_floods(episodes: int, seconds: float) -> dict[str, Any]:
    return {name: await measure_flood(*flood, episodes, seconds) for name, flood in FLOODS.items()}


if __name__ == "__main__":
    found = asyncio.run(measure_floods(int(sys.argv[1]), float(sys.argv[2])))
    print(json.dumps(found))
