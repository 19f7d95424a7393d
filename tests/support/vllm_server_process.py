"""vLLM's own OpenAI-compatible server of a model, as a process on this machine."""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from flotilla_common.process.child_environment import child_environment
from flotilla_common.rpc.free_ports import free_port
from tests.support.started_process import end_process

_READY_S = 240.0


@contextmanager
def serving_vllm(model: Path, log: Path, *options: str, port: int = 0) -> Generator[str]:
    """Serve a model on a CPU; yield the base URL of its API once it is loaded."""
    port = port or free_port()
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 28)),
        *options,
    ]
    environment = {
        **child_environment(ours=True),
        **{"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, text=True, start_new_session=True
        )
        try:
            _wait_until_ready(process, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end_process(process)


def _wait_until_ready(process: subprocess.Popen[str], port: int, log: Path) -> None:
    until = time.monotonic() + _READY_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success:
                return
        time.sleep(0.3)
    raise AssertionError(f"vLLM does not serve: {log.read_text()[-4000:]}")
