"""A healthy run, faults to plant in it, and doubles of the services that it calls."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flotilla_common.spec.config import canonical_json, parse_config
from flotilla_common.spec.spec_loading import apply_override
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_environments.server.http_process import TOKEN_VARIABLE as EMULATOR_KEY
from flotilla_launcher.cli import doctor
from flotilla_launcher.control import spec_check
from flotilla_launcher.control.spec_check import check_command
from flotilla_launcher.doctor import run_context, start_gate
from flotilla_launcher.doctor.findings import ProbeResult, Status
from flotilla_launcher.doctor.probe_list import PROBES
from flotilla_launcher.doctor.run_context import RunContext, make_run_context
from flotilla_launcher.doctor.run_probes import run_probes
from flotilla_launcher.run_spec import parse_spec
from flotilla_learner.config.learner import LearnerConfig
from flotilla_rollout.config.rollout import RolloutConfig
from tests.support.environment_processes import environment_command
from tests.support.process_forge import ProcessForge, shared_forge
from tests.support.repository import ROOT
from tests.support.started_process import serving_process

# Probes that need no torch.
_FORGED = ("episodes", "tokenizer", "dialect", "dataset")
Handle = Callable[[str, Mapping[str, str], Mapping[str, Any]], tuple[int, Any]]


def spec(policy: Path, tasks: Path, *overrides: str) -> dict[str, Any]:
    """A healthy run, except for the overrides."""
    made: dict[str, Any] = {
        "name": "well",
        "policy": {"model": str(policy), "dtype": "float32", "max_model_len": 8192},
        "env_gateway": {"backend": "embedded"},
        "rollout": {
            "max_attempts": 4,
            "max_input_length": 4000,
            "max_generate_length": 40,
            "engine": {"device": "cpu", "max_num_seqs": 4},
        },
        "learner": {"tasks": str(tasks), "steps": 2, "groups_per_step": 2, "group_size": 2},
    }
    for override in overrides:
        apply_override(made, override)
    return made


def subject(content: Mapping[str, Any], folder: Path, **environ: str) -> RunContext:
    """`environ` on top of this process's, without a developer's own variables."""
    ours = ("WANDB_API_KEY", "WANDB_BASE_URL", "FLEET_API_KEY", "SLACK_BOT_TOKEN", "FLOTILLA_TOKEN")
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    nothing = {"NETRC": os.devnull, "HF_HUB_OFFLINE": "1"}
    plan = parse_spec(canonical_json(content))
    return make_run_context(plan, folder / "runs", {**plain, **nothing, **environ})


def service_forge() -> ProcessForge:
    """Return the forge of services and tokenizers."""
    return shared_forge("tests.support.forged_probes")


@contextmanager
def forged_services() -> Generator[None]:
    """Have services check a spec and print their sections of it, and the doctor do what needs no
    torch, in forks of a process that has imported what they need."""

    def forged(
        modules: Mapping[str, str], service: str, overrides: Sequence[str] = ()
    ) -> tuple[str, ...]:
        command = check_command(modules, service, overrides)
        return service_forge().python_command(*command[command.index("-m") :])

    with (
        patch.object(run_context, "check_command", forged),
        patch.object(spec_check, "check_command", forged),
        patch.object(start_gate, "make_run_context", _make_forged_context),
        patch.object(doctor, "make_run_context", _make_forged_context),
    ):
        yield


def _make_forged_context(*given: Any) -> RunContext:
    return _forged(make_run_context(*given))


def _forged(about: RunContext) -> RunContext:
    """Return the context with a forge's interpreter for this machine's."""
    here = about.python == Path(sys.executable)
    return replace(about, python=service_forge().interpreter) if here else about


async def probed(name: str, about: RunContext, *, torch: bool = False) -> ProbeResult:
    """Return the result of one probe. What it does with tokenizers and gateways, it does in
    forks of a process that has imported them, unless that needs torch."""
    if name in _FORGED and not torch:
        about = _forged(about)
    chosen = [probe for probe in PROBES if probe.name == name]
    return (await run_probes(replace(about, sections=sections(about.plan.tables)), chosen))[0]


def sections(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections as the services print them, without starting the services."""
    classes = {"env_gateway": EnvGatewayConfig, "learner": LearnerConfig, "rollout": RolloutConfig}
    return {
        service: parse_config(cls, content[service], where=service).model_dump(mode="json")
        for service, cls in classes.items()
    }


# Doubles of SkyPilot's modules of these names, limited to the doctor's calls.
SKYPILOT = {
    "exceptions": "class ServerTemporarilyUnavailableError(Exception): ...",
    "server/common": """
import os, requests
def get_server_url(): return os.environ["SKYPILOT_API_SERVER_ENDPOINT"]
def redact_url_password(url): return url
def make_authenticated_request(method, path, retry, timeout):
    return requests.request(method, get_server_url() + path, timeout=timeout)
""",
    # Only Lambda is enabled.
    "client/sdk": """
def check(clouds, verbose): return "request"
def get(request): return {"default": {"lambda": ["compute"]}}
""",
}


def skypilot(folder: Path, url: str) -> dict[str, str]:
    """The environment in which a double of SkyPilot has its API server at `url`."""
    for name, text in SKYPILOT.items():
        path = folder / "sky" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    search = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "gen")])
    return {"PYTHONPATH": search, "SKYPILOT_API_SERVER_ENDPOINT": url}


def check(result: ProbeResult, status: Status, *words: str) -> None:
    assert result.status is status, result.detail
    for word in words:
        assert word in result.detail, result.detail


@contextmanager
def double(handle: Handle) -> Generator[str]:
    """The URL of a server that answers (path, headers, body) by `handle`."""

    class JsonHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            text = self.rfile.read(size) or b"{}"
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                body = json.loads(text)
            except ValueError:
                body = {}
            status, answer = handle(self.path, headers, body)
            extra: dict[str, str] = answer.pop("headers", {}) if isinstance(answer, dict) else {}
            data = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**extra, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), JsonHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def emulator(key: str, *options: str) -> Generator[str]:
    """The URL of Fleet's emulator, which insists on `key`."""
    command = environment_command(
        "-m", "flotilla_environments.fleet_emulator", "--port", "0", *options
    )
    environ, quiet = {**os.environ, EMULATOR_KEY: key}, subprocess.DEVNULL
    with serving_process(command, stderr=quiet, cwd=ROOT, env=environ) as url:
        yield url.rstrip("/")
