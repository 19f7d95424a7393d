"""Writes fixtures/prime_rl.json, from a checkout of prime-rl: see README.md."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.parity import inputs
from tests.parity.fixtures import Recorder
from tests.parity.recording import tensors, with_gradient

# prime-rl is not on PyPI; this is its tag v0.8.0.
COMMIT = "60bc29547a8824ad1de7b9af8d265e2b27b2a72d"
_LOSS = "src/prime_rl/trainer/rl/loss.py"
_CONFIG = "packages/prime-rl-configs/src/prime_rl/configs/trainer.py"


def load_losses(checkout: Path) -> Any:
    """Import prime-rl's losses, whose package needs GPUs, with empty modules for its configs and
    helpers: the functions called here take only numbers from them."""
    for name, names in (
        ("prime_rl.configs.trainer", "CustomLossConfig DefaultLossConfig IPOLossConfig LossConfig"),
        ("prime_rl.utils.utils", "import_object"),
    ):
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(names.split(), object))
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("prime_rl_loss", checkout / _LOSS)
    assert spec is not None and spec.loader is not None
    losses = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = losses
    spec.loader.exec_module(losses)
    return losses


def default_settings(checkout: Path) -> dict[str, float]:
    """Read the defaults of `[trainer.loss]`."""
    text = (checkout / _CONFIG).read_text().partition("class DefaultLossConfig")[2]
    found = re.findall(r"(\w+): float = Field\(([\d.e-]+),", text.partition("\nclass ")[0])
    return {name: float(value) for name, value in found}


def add_losses(record: Recorder, checkout: Path) -> None:
    losses, defaults = load_losses(checkout), default_settings(checkout)
    record.inputs["tokens"] = inputs.tokens()
    given = tensors(record.inputs["tokens"])
    mask = given["mask"].bool()
    # The tokens' probabilities move by less than the default bounds.
    narrow = {"dppo_mask_low": 0.05, "dppo_mask_high": 0.1}
    for name, settings in (
        ("dppo_default", defaults),
        ("dppo_strong_kl", {**defaults, **narrow, "kl_tau": 0.5}),
    ):

        def loss(logprobs: Tensor, settings: dict[str, float] = settings) -> Tensor:
            def rl_loss(one: Any) -> Any:
                return losses.default_loss_fn(one, SimpleNamespace(**settings))

            rows = (list(each) for each in (logprobs, given["old"], given["advantages"], mask))
            trainer, sampler, advantages, masks = rows
            scale = int(mask.sum())
            value, _ = losses.compute_loss(
                *(trainer, sampler, None, advantages, masks, None, None, None, rl_loss, scale, 1, 1)
            )
            return value

        outputs = with_gradient(loss, given["logprobs"])
        path = "prime_rl.trainer.rl.loss.compute_loss"
        record.add("loss", name, path, "tokens", outputs, **settings)


def main() -> None:
    checkout = Path(sys.argv[1])
    head = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    found = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    if found != COMMIT:
        raise SystemExit(f"{checkout} is at {found}, not at {COMMIT}")
    torch.set_default_dtype(torch.float64)
    record = Recorder("prime_rl", COMMIT)
    add_losses(record, checkout)
    print(record.write())


if __name__ == "__main__":
    main()
