"""The model that a user has chosen to play: one of an endpoint, or one that vLLM serves here."""

import os
import shlex
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from flotilla_launcher.cli.adapters.chat_endpoint import (
    PATIENCE,
    ChatEndpoint,
    Patience,
    open_endpoint,
)
from flotilla_launcher.cli.adapters.vllm_server import serve_model
from flotilla_launcher.cli.terminal import CommandError, Terminal

_URL = ("http://", "https://")
# Host of a server that listens on a socket of this machine.
_LOCAL_URL = "http://localhost/v1"


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """`model` is the URL of an endpoint, of which `name` is a model, or a model for vLLM, with
    `vllm_args`. `key_env` names the variable with the endpoint's key."""

    model: str
    name: str
    key_env: str
    temperature: float | None
    vllm_args: str


def is_url(model: str) -> bool:
    """Return whether a model is that of an endpoint."""
    return model.startswith(_URL)


def split_vllm_args(text: str) -> list[str]:
    """Return the words of `--vllm-args`. Raises CommandError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CommandError(f"--vllm-args: {error}") from error


@asynccontextmanager
async def open_model(
    chosen: ChosenModel, console: Terminal, patience: Patience = PATIENCE
) -> AsyncGenerator[ChatEndpoint]:
    """Connect to the model, served here if it is no URL. Raises CommandError."""

    def show_progress(text: str) -> None:
        console.print(text, style="dim")

    options = split_vllm_args(chosen.vllm_args)
    url, key, socket = chosen.model, os.environ.get(chosen.key_env, "").strip(), None
    async with AsyncExitStack() as stack:
        if not is_url(url):
            # The key is for others than this server.
            url, key = _LOCAL_URL, ""
            serving = serve_model(chosen.model, options, show_progress)
            socket = await stack.enter_async_context(serving)
        opening = open_endpoint(
            url,
            model=chosen.name,
            key=key,
            temperature=chosen.temperature,
            socket=socket,
            patience=patience,
        )
        yield await stack.enter_async_context(opening)
