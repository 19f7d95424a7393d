"""vLLM's own OpenAI-compatible server of one model, as a child process: on a private socket, or
at an address for other programs."""

import asyncio
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import httpx

from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.models.text_only import add_to_python_path, find_stand_ins
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.extras import install_command
from flotilla_common.process.python_command import python_command, tied_command
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_launcher.cli.terminal import CommandError

# The program of `vllm serve`, which needs metadata that builds for CPUs lack.
_MODULE = "vllm.entrypoints.launchers.api_server.entry"
_OPTIONS = (
    # As flotilla's own engines read calls by default: JSON between <tool_call> tags.
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # Never a pickle, which could run code when loaded.
    *("--load-format", "safetensors"),
    # Attempts have no images to show.
    "--language-model-only",
)
# Without a GPU vLLM would take nearly all memory of the machine, and refuse if some is in use.
_CPU_CACHE = ("--kv-cache-memory-bytes", str(4 << 30))
# The line of a traceback that names the error; the last one of vLLM's only refers to another.
_CAUSE = re.compile(r"\b\w+Error: .+")
# Clients of the server name its value, if the variable is set.
KEY_VARIABLE = "VLLM_API_KEY"
# Host of a server that listens on a socket of this machine.
_LOCAL_URL = "http://localhost"
# Where a server that listens on all addresses is reached from here.
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_POLL_S = 0.5
_SHOW_S = 10.0
_END_S = 20.0
_SHOWN_LINES = 20
_LINE_BYTES = 1 << 20


@asynccontextmanager
async def serve_model(
    model: str, options: Sequence[str], show: Callable[[str], None]
) -> AsyncGenerator[Path]:
    """Serve a model, a folder or a name of the hub; yield the server's socket once it is loaded.
    `show` receives its progress. `options` are vLLM's and override ours. Raises
    CommandError."""
    with scratch_folder() as (folder, keeper):
        socket = folder / "vllm.sock"
        words = ("--uds", str(socket), *options)
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with (
            httpx.AsyncClient(transport=transport, base_url=_LOCAL_URL) as http,
            _serving(model, words, show, http, pass_fds=(keeper,)),
        ):
            yield socket


@asynccontextmanager
async def serve_model_at(
    host: str, port: int, model: str, options: Sequence[str], show: Callable[[str], None]
) -> AsyncGenerator[Process]:
    """Serve a model as `serve_model` does, at an address; yield the server's process. It accepts
    the key in VLLM_API_KEY only, if that is set. Raises CommandError."""
    words = ("--host", host, "--port", str(port), *options)
    url = f"http://{join_host_port(_ANY_HOST.get(host, host), port)}"
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
        _serving(model, words, show, http, KEY_VARIABLE) as process,
    ):
        yield process


@asynccontextmanager
async def _serving(
    model: str,
    words: Sequence[str],
    show: Callable[[str], None],
    http: httpx.AsyncClient,
    *variables: str,
    pass_fds: Sequence[int] = (),
) -> AsyncGenerator[Process]:
    """Run the server until it answers `http`; yield its process. Raises CommandError."""
    if find_spec("vllm") is None:
        raise CommandError(
            f"{model} is no URL, and vLLM, which would serve it, is not installed here:"
            f" {install_command('rollout')} (without a GPU, rollout-cpu)"
        )
    own = (*_OPTIONS, *(_CPU_CACHE if _is_cpu_build() else ()))
    command = python_command("-m", _MODULE, "--model", model, *own, *words)
    process = await asyncio.create_subprocess_exec(
        *tied_command(signal.SIGTERM, *command),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        limit=_LINE_BYTES,
        pass_fds=pass_fds,
        # Ctrl-C is for this process, which ends the server after the attempts.
        start_new_session=True,
        env={
            "VLLM_NO_USAGE_STATS": "1",
            **child_environment("HF_TOKEN", *variables, ours=True),
            **add_to_python_path(find_stand_ins()),
        },
    )
    lines: deque[str] = deque(maxlen=_SHOWN_LINES)
    async with running_tasks(_keep_lines(process, lines)) as (reading,):
        try:
            await _wait_until_ready(model, process, http, reading, lines, show)
            yield process
        finally:
            await _end_server(process)


async def _wait_until_ready(
    model: str,
    process: Process,
    http: httpx.AsyncClient,
    reading: asyncio.Task[list[str]],
    lines: Sequence[str],
    show: Callable[[str], None],
) -> None:
    began = shown = loop_time()
    while process.returncode is None:
        with suppress(httpx.HTTPError):
            if (await http.get("/health", timeout=_SHOW_S)).is_success:
                show(f"{model} is served after {loop_time() - began:.0f} s")
                return
        if loop_time() - shown > _SHOW_S:
            shown = loop_time()
            last = lines[-1][:200] if lines else "started"
            show(f"vLLM is loading {model}, {shown - began:.0f} s: {last}")
        await asyncio.sleep(_POLL_S)
    cause = "".join(f" {each}" for each in await reading)
    words = "\n".join(lines) or "it printed nothing"
    raise CommandError(f"vLLM ended with code {process.returncode}:{cause}\n{words}")


def _is_cpu_build() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


async def _keep_lines(process: Process, lines: deque[str]) -> list[str]:
    """Keep the last lines of the server's output: unread, it would block the server. Return the
    first error that it named, if any."""
    assert process.stdout is not None
    causes: list[str] = []
    while line := await process.stdout.readline():
        # A bar of progress ends with a return, and begins its line again.
        text = line.decode("utf-8", "replace").strip().rpartition("\r")[2]
        if text:
            lines.append(text)
        if not causes and "WARNING" not in text:
            causes += [found[0] for found in _CAUSE.finditer(text)][:1]
    return causes


async def wait_for_end(process: Process) -> int:
    """Return the code of a server once it has ended by itself. Its engines may outlast it, with its
    output still open, and then `Process.wait` would not return."""
    # asyncio has no event for it.
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    return process.returncode


async def _end_server(process: Process) -> None:
    """End the server and its engines."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await wait_for_end(process)
    # Engines are processes of its session, which a server that is killed leaves.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
