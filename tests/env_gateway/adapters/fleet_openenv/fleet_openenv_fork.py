"""A stand-in for Fleet's fork of OpenEnv, of its shape, and a control plane for what it creates."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tests.support.http_server import serving_app

SDK = """
import json, os, urllib.request
from types import SimpleNamespace

class FleetEnvironmentNotFoundError(Exception):
    ...

class AsyncFleet:
    async def make(self, env_key, run_id=None, **keywords):
        if env_key == "nowhere":
            raise FleetEnvironmentNotFoundError("Environment 'nowhere' not found")
        body = json.dumps({"env_key": env_key, "run_id": run_id}).encode()
        url = os.environ["FLEET_BASE_URL"] + "/v1/env/instances"
        headers = {"authorization": "Bearer " + os.environ["FLEET_API_KEY"]}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return SimpleNamespace(**json.load(answer))
"""
TASKS = """
from types import SimpleNamespace

class Task:
    async def verify_detailed_async(self, code, answer):
        result = {"reported": {"score": 0, "passed": ["a"], "failed": ["b"]}}.get(code, 0)
        return SimpleNamespace(success=True, result=result, stdout=answer)
"""
FORK = """
import asyncio, os, sys
from fleet import AsyncFleet
from fleet._async.tasks import Task

PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}

def _tool(name):
    parameters = {"type": "object", "properties": {}, "required": []}
    return {"type": "function",
            "function": {"name": name, "description": "D", "parameters": parameters}}

class FleetTaskEnv:
    def __init__(self, task_config, api_key=None, ttl_seconds=None, max_steps=50):
        self.task, self.ttl_seconds, self.max_steps = task_config, ttl_seconds, max_steps
        self.verifier_stdout = self.verifier_error = self.conversation_messages = None
        self.answer = None

    async def reset_async(self, seed=None):
        print("provisioning")
        await AsyncFleet().make(self.task["env_key"], data_key=self.task["data_key"])
        if self.task["prompt"] == "never ready":
            await _forever()
        if self.task["prompt"] == "no tools":
            raise RuntimeError("list_tools returned no tools")
        tools = [_tool(n) for n in ("echo", "hang", "crash", "fail", "submit_final_answer")]
        shown = {"initial_screenshot": [PNG]} if self.task["task_modality"] != "tool_use" else {}
        return {"observation": {}, "step": 0, "tools": tools, **shown}

    async def step_async(self, action):
        tool, params, info = action.get("tool"), action.get("params", {}), {}
        if tool == "hang":
            await _forever()
        elif tool == "crash":
            os._exit(3)
        elif tool == "fail":
            info["tool_error"] = params["message"]
        elif tool == "submit_final_answer":
            self.answer = params["answer"]
        elif tool == "echo":
            print("x" * 1000, flush=True)
            info["tool_result"] = params["value"]
            if isinstance(params["value"], dict) and "error" in params["value"]:
                info["tool_error"] = params["value"]["error"]
        done = bool(action.get("done")) or tool == "submit_final_answer"
        return {}, await self._grade() if done else 0.0, done, info

    async def _grade(self):
        code = self.task["verifier_code"]
        if code in ("reported", "printed"):
            verified = await Task().verify_detailed_async(code, self.answer)
            self.verifier_stdout, judged = verified.stdout, "JUDGE ERROR:" in verified.stdout
            return None if judged else float(verified.result)
        self.verifier_stdout = f"{self.answer} {self.conversation_messages}"
        if code == "unknown":
            self.verifier_error = "Judge error"
            return None
        return 1.0

    async def close_async(self):
        print("closed")

async def _forever():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            continue
"""


class ControlPlane:
    """Fleet's, as far as it goes: instances that run, by their tag."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self.keys: set[str] = set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        app = web.Application()
        app.router.add_post("/v1/env/instances", self._create)
        app.router.add_delete("/v1/env/instances/batch", self._delete)
        app.router.add_get("/v1/env/instances", self._list)
        app.router.add_get("/v1/env/instances/{instance_id}", self._one)
        async with serving_app(app) as self.url:
            yield

    async def _create(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["authorization"])
        instance_id = f"i{len(self.running)}"
        self.running[instance_id] = (await request.json())["run_id"]
        return web.json_response({"instance_id": instance_id, "version": "v7"})

    async def _delete(self, request: web.Request) -> web.Response:
        tag = request.query["run_id"]
        self.running = {i: t for i, t in self.running.items() if t != tag}
        return web.json_response([])

    async def _list(self, request: web.Request) -> web.Response:
        tagged = [i for i, tag in self.running.items() if tag == request.query["run_id"]]
        return web.json_response([{"instance_id": i, "status": "running"} for i in tagged])

    async def _one(self, request: web.Request) -> web.Response:
        known = request.match_info["instance_id"] in self.running
        return web.json_response({"status": "running"}, status=200 if known else 404)


def write_fork(folder: Path) -> None:
    """A checkout: the package below `src`, and a `fleet` package of its own beside it."""
    package = folder / "src" / "envs" / "fleet_env"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FORK)
    sdk = folder / "src" / "fleet"
    sdk.mkdir()
    (sdk / "__init__.py").write_text(SDK)
    (sdk / "_async").mkdir()
    (sdk / "_async" / "tasks.py").write_text(TASKS)
