"""`flotilla serve`: a run's model behind vLLM's own OpenAI-compatible server."""

import json
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.rpc.network_addresses import is_loopback, join_host_port
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.cli.adapters.chosen_model import split_vllm_args
from flotilla_launcher.cli.adapters.model_families import find_family
from flotilla_launcher.cli.adapters.vllm_server import KEY_VARIABLE, serve_model_at, wait_for_end
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    INTERRUPTED,
    OK,
    reports_errors,
    run_until_interrupted,
)
from flotilla_launcher.cli.eval_sources import find_run
from flotilla_launcher.cli.exported_models import keep_export
from flotilla_launcher.cli.served_dialects import is_explained, serving_options
from flotilla_launcher.cli.terminal import CommandError, Terminal

_EXPLAINED = (
    'the run\'s dialect is "full": it explained the tools in a system message of its own, which the'
    " model's chat template does not write. A client must write one to get calls of tools"
)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run's model for vLLM: its folder, its name `RUN@STEP`, the spec of the run, and where that
    is."""

    folder: Path
    name: str
    spec: Mapping[str, Any]
    path: Path

    def options(self) -> list[str]:
        """Return vLLM's options for it. Raises ConfigError."""
        return serving_options(self.spec, find_family(self.spec["policy"]["model"]))


def find_served_run(text: str, runs: Path) -> ServedRun:
    """Return the model of `RUN` or `RUN@STEP`, exported if it is not there yet. Raises
    CommandError and ConfigError."""
    found = find_run(text, runs)
    if found is None:
        raise CommandError(
            f"there is no run {text!r} in {runs} (RUN, or RUN@STEP); `flotilla status` lists them"
        )
    run_dir, step = found
    folder, step = keep_export(run_dir, step)
    path = run_dir / "spec.json"
    return ServedRun(folder, f"{run_dir.name}@{step}", load_spec(path), path)


@reports_errors(bad_spec=BAD_SPEC)
def serve_run(text: str, runs: Path, host: str, port: int, vllm_args: str) -> int:
    """Serve until Ctrl-C, which is the normal end."""
    if not (is_loopback(host) or os.environ.get(KEY_VARIABLE)):
        raise CommandError(
            f"--host {host} lets other machines in: set {KEY_VARIABLE} to a key that clients must"
            " send"
        )
    port = port or free_port()
    _refuse_taken(host, port)
    console = Terminal(soft_wrap=True)
    served = find_served_run(text, runs)
    if is_explained(served.spec):
        console.print(f"warning: {_EXPLAINED}")
    options = [*served.options(), *split_vllm_args(vllm_args)]
    code = run_until_interrupted(_serve(served, host, port, options, console))
    return OK if code == INTERRUPTED else code


def _refuse_taken(host: str, port: int) -> None:
    """Raise CommandError before a model is loaded if nothing can listen at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            at = join_host_port(host, port)
            raise CommandError(
                f"cannot listen at {at}: {error.strerror or error}; pass another --port, or"
                " --port 0 for any"
            ) from error


async def _serve(
    served: ServedRun, host: str, port: int, options: Sequence[str], console: Terminal
) -> None:
    def show(text: str) -> None:
        console.print(text, style="dim")

    words = ("--served-model-name", served.name, *options)
    show(f"loading {served.folder}")
    async with serve_model_at(host, port, str(served.folder), words, show) as process:
        url = f"http://{join_host_port(host, port)}/v1"
        console.print(f"{served.name} is served at {url}; Ctrl-C ends it. For example:")
        console.print(_format_request(url, served.name))
        code = await wait_for_end(process)
    raise CommandError(f"vLLM ended with code {code}")


def _format_request(url: str, name: str) -> str:
    """Return a request as a line for a shell."""
    body = {"model": name, "messages": [{"role": "user", "content": "What can you do?"}]}
    words = ["curl", f"{url}/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(body)])
    # Quoted so that the shell fills the key in, which is not printed.
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if os.environ.get(KEY_VARIABLE) else ""
    return line + key
