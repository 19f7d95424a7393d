"""The server under test, and Tinker's client on it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.repository import ROOT
from tests.support.started_process import started
from tests.tinker.client.stage import MODEL

# The client's threads and libraries warn of what is no matter of ours.
client_tests = [pytest.mark.tinker_client, pytest.mark.filterwarnings("ignore")]
# None where `make tinker-client` has not installed it.
INSTALLED = find_spec("tinker") is not None
tinker: Any = import_module("tinker") if INSTALLED else None
KEY = "tml-test"
START_S = 600.0
# Another server to judge, such as one that runs already.
_OTHER = "TINKER_BASE_URL"


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    # The user's folder, which holds the model and data sets.
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a user's shell."""
        return {
            **os.environ,
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
        }


@contextmanager
def serving(folder: Path, state: Path) -> Iterator[Served]:
    """Serve the model of a user's folder until the block ends."""
    if url := os.environ.get(_OTHER):
        yield Served(url, folder)
        return
    command = (ROOT / ".venv/bin/flotilla", "tinker-serve", MODEL, "--state", state)
    with started(command, limit_s=START_S, cwd=folder) as (_, line):
        yield Served(line.split()[-1], folder)


@contextmanager
def client_of(served: Served, **options: Any) -> Iterator[Any]:
    """A ServiceClient, whose session ends with the block."""
    client = tinker.ServiceClient(base_url=served.url, api_key=KEY, **options)
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
