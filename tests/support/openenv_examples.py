"""Serves environments made with the openenv package: `openenv_examples.py KIND`.

Runs under an interpreter that has the package, 0.3 to 0.10, and imports nothing of this repository.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUntypedFunctionDecorator=false

import argparse
import importlib
import json
import socket
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from fastmcp.utilities.types import Image
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

PNG = bytes.fromhex("89504e470d0a1a0a0000000d494844520000000200000003")
_NAMES = {
    "__ENV_CLASS_NAME__": "Echo",
    "__ENV_TITLE_NAME__": "Echo",
    "__ENV_NAME__": "echo_env",
}
_active = 0


def echo() -> tuple[Any, Any, Any]:
    """Build what `openenv init echo_env` writes, from the template in the package."""
    template = resources.files("openenv.cli.templates") / "openenv_env"
    folder = Path(tempfile.mkdtemp()) / "echo_env"
    for name in ("__init__.py", "models.py", "client.py", "server/__ENV_NAME___environment.py"):
        text, path = template.joinpath(name).read_text(), name
        for placeholder, value in _NAMES.items():
            text, path = text.replace(placeholder, value), path.replace(placeholder, value)
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "server" / "__init__.py").touch()
    sys.path.insert(0, str(folder.parent))
    models = importlib.import_module("echo_env.models")
    module = importlib.import_module("echo_env.server.echo_env_environment")
    return module.EchoEnvironment, models.EchoAction, models.EchoObservation


class TicketsObservation(Observation):
    told: dict[str, Any]


class TicketsEnvironment(MCPEnvironment):
    """Tools by FastMCP; closing ticket 1 ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tickets")
        self._closed: list[int] = []
        self._state = State(episode_id=None, step_count=0)

        @server.tool()
        def close_ticket(ticket_id: int) -> dict[str, int]:
            """Close a ticket."""
            if ticket_id > 9:
                raise ValueError(f"no ticket {ticket_id}")
            self._closed.append(ticket_id)
            return {"closed": ticket_id}

        @server.tool()
        def screenshot() -> Any:
            """Show the screen."""
            return Image(data=PNG, format="png")

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **fields: Any) -> Any:
        self._closed.clear()
        self._state = State(episode_id=episode_id, step_count=0)
        # Version 0.3 keeps metadata to itself.
        return TicketsObservation(told={"seed": seed, **fields})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        raise NotImplementedError

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        observation = await super().step_async(action, timeout_s=timeout_s)
        if isinstance(action, CallToolAction):
            observation.done = 1 in self._closed
            observation.reward = 1.0 if observation.done else -0.25
        return observation

    @property
    def state(self) -> State:
        return self._state


class OddAction(Action):
    how: str = Field(description="raise, wait, big, image or nothing")


class OddObservation(Observation):
    said: str = ""
    screen: str = ""


class OddEnvironment(Environment):
    """Fails on request, and never gives a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_key: str = ""
    ) -> Any:
        if task_key == "refused":
            raise ValueError("there is no such task")
        return OddObservation()

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        if action.how == "raise":
            raise RuntimeError("it broke")
        if action.how == "wait":
            time.sleep(1)
        size = 2**20 if action.how == "big" else 4
        screen = "data:image/png;base64," + "iVBORw0KGgo=" if action.how == "image" else ""
        return OddObservation(said="x" * size, screen=screen)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)


def counted(kind: Any) -> Any:
    """The class, whose open instances are counted."""

    class Counted(kind):
        def __init__(self) -> None:
            global _active
            super().__init__()
            _active += 1
            self._counted = True

        def close(self) -> None:
            global _active
            super().close()
            _active -= self._counted
            self._counted = False

    return Counted


_KINDS = {
    "echo": echo,
    "tickets": lambda: (TicketsEnvironment, CallToolAction, CallToolObservation),
    "odd": lambda: (OddEnvironment, OddAction, OddObservation),
}


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        print(json.dumps({"url": f"http://127.0.0.1:{sockets[0].getsockname()[1]}"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=list(_KINDS))
    parser.add_argument("--limit", type=int, default=64)
    options = parser.parse_args()
    environment, action, observation = _KINDS[options.kind]()
    app = create_app(
        counted(environment),
        action,
        observation,
        env_name=options.kind,
        max_concurrent_envs=options.limit,
    )
    app.add_api_route("/sessions", lambda: {"active": _active})
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    _Server(config).run([listener])


if __name__ == "__main__":
    main()
