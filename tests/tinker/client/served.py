"""The server under test, and Tinker's client on it."""

import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

from flotilla_common.rpc.free_ports import free_port
from tests.support.repository import ROOT
from tests.tinker.client.stage import MODEL

# The client's threads and libraries warn of what is no matter of ours.
client_tests = [pytest.mark.tinker_client, pytest.mark.filterwarnings("ignore")]
# None where `make tinker-client` has not installed it.
INSTALLED = find_spec("tinker") is not None
tinker: Any = import_module("tinker") if INSTALLED else None
START_S = 600.0
_END_S = 120.0
# Another server to judge, such as one that runs already.
_OTHER = "TINKER_BASE_URL"


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    key: str
    # The user's folder, which holds the model and data sets.
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a user's shell."""
        own = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "HF_HUB_OFFLINE": "1"}
        return {**os.environ, **own}


@contextmanager
def serving(folder: Path, state: Path) -> Generator[Served]:
    """Serve the model of a user's folder until the block ends; what it keeps is in `state`."""
    if url := os.environ.get(_OTHER):
        yield Served(url, os.environ["TINKER_API_KEY"], folder)
        return
    command = [str(ROOT / ".venv/bin/flotilla"), "tinker-serve", MODEL, "--folder", str(state)]
    command += ["--listen", f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            url, key = _read_variables(process, state)
            yield Served(url, key, folder)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_END_S)


def _read_variables(process: "subprocess.Popen[str]", state: Path) -> tuple[str, str]:
    """Return what a user would export, once the server has printed it."""
    assert process.stdout is not None
    found: dict[str, str] = {}
    timer = Timer(START_S, process.kill)
    timer.start()
    for line in process.stdout:
        name, is_export, value = line.strip().removeprefix("export ").partition("=")
        found |= {name: value} if is_export else {}
        if len(found) == 2:
            timer.cancel()
            return found["TINKER_BASE_URL"], found["TINKER_API_KEY"]
    logs = (path.read_text()[-2000:] for path in sorted((state / "logs").glob("*.log")))
    raise AssertionError("\n".join(("the server has not started", *logs)))


@contextmanager
def client_of(served: Served, **options: Any) -> Generator[Any]:
    """A ServiceClient, whose session ends with the block."""
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key, **options)
    try:
        yield client
    finally:
        client.close("success").result()


def new_trainer(client: Any, rank: int = 8, seed: int = 1, **options: Any) -> Any:
    return client.create_lora_training_client(MODEL, rank=rank, seed=seed, **options).result()


def prompt_of(ids: Sequence[int]) -> Any:
    return tinker.ModelInput.from_ints(list(ids))


def example(ids: Sequence[int], **inputs: Any) -> Any:
    """A datum that predicts each token from those before it; weights 1 if nothing else is given."""
    given = inputs or {"weights": np.ones(len(ids) - 1, np.float32)}
    targets = np.array(ids[1:], np.int64)
    return tinker.Datum(
        model_input=prompt_of(ids[:-1]), loss_fn_inputs={"target_tokens": targets, **given}
    )


def adam(learning_rate: float = 1e-2, **options: Any) -> Any:
    return tinker.AdamParams(learning_rate=learning_rate, **options)


def train_step(trainer: Any, data: Sequence[Any], learning_rate: float = 1e-2) -> Any:
    """One step of cross entropy; the result of its backward pass."""
    backward = trainer.forward_backward(list(data), "cross_entropy")
    update = trainer.optim_step(adam(learning_rate))
    update.result()
    return backward.result()


def logprobs_of(trainer: Any, ids: Sequence[int]) -> np.ndarray:
    """The trainer's logprobs of tokens 1 to n-1."""
    result = trainer.forward([example(ids)], "cross_entropy").result()
    return np.array(result.loss_fn_outputs[0]["logprobs"].data, np.float32)


def sampled_logprobs_of(sampler: Any, ids: Sequence[int]) -> np.ndarray:
    """The sampler's logprobs of tokens 1 to n-1."""
    return np.array(sampler.compute_logprobs(prompt_of(ids)).result()[1:], np.float32)


def sample(sampler: Any, ids: Sequence[int], num_samples: int = 1, **params: Any) -> Any:
    settings = tinker.SamplingParams(**({"max_tokens": 8} | params))
    return sampler.sample(prompt_of(ids), num_samples, settings).result()
