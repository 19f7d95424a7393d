"""Drives a server of ours with openenv's own clients, and prints their results as JSON.

Runs under an interpreter that has the package: `openenv_client.py URL TASK_KEY PLAN`.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

from openenv.core import GenericEnvClient, MCPToolClient


async def by_steps(url: str, task_key: str, plan: list[Any]) -> dict[str, Any]:
    """The environment protocol, with rewards."""
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(task_key=task_key)
        steps: list[Any] = []
        for name, arguments in [*plan, ("submit_final_answer", {"answer": "done"})]:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            step = await env.step(action)
            steps.append([step.observation["result"], step.reward, step.done])
        return {"prompt": first.observation["prompt"], "steps": steps, "state": await env.state()}


async def by_tools(url: str, task_key: str, plan: list[Any]) -> dict[str, Any]:
    """The client for tools alone, which goes another way and sees no rewards."""
    async with MCPToolClient(base_url=url) as env:
        await env.reset(task_key=task_key)
        tools = await env.list_tools()
        results = [(await env.call_tool(name, **arguments))["result"] for name, arguments in plan]
        return {"tools": {tool.name: tool.input_schema for tool in tools}, "results": results}


async def main() -> None:
    url, task_key, plan = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    seen = {
        "steps": await by_steps(url, task_key, plan),
        "tools": await by_tools(url, task_key, plan),
    }
    print(json.dumps(seen, default=dict))


if __name__ == "__main__":
    asyncio.run(main())
