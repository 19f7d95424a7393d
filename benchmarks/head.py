"""CPU and memory of the fused output head over a plain one: `python -m benchmarks.head`.

Computes a policy loss forward and backward for a pack with 40 % policy tokens, over the vocabulary
of Qwen3: by the ranks' head, and by logits of all tokens, their log_softmax and autograd. Each runs
in processes of its own, in turns. The last line is one JSON object:

- `cpu`: CPU seconds of the fused head over those of the plain one, the median of the pairs.
- `memory`: the same for the peak of resident memory, above the memory before the pass.
- `loss_diff`, `gradient_diff`: the largest relative differences between the two.

About 2 minutes on 2 idle cores, and 9 GB of memory: with fewer tokens the head's own gradient,
which both sides have, would dominate the memory of the fused side.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from flotilla_learner.algo.logprob_head import fused_policy_loss

VOCABULARY, WIDTH, TOKENS = 151_936, 1024, 4096
POLICY_SHARE, CHUNK, PAIRS = 0.4, 512, 2
SIDES = ("fused", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        print(json.dumps(measure_side(given.side, given.folder)))
        return
    with TemporaryDirectory() as folder:
        print(json.dumps(compare_sides(given.pairs, Path(folder))))


def compare_sides(pairs: int, folder: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(pairs):
        for side in SIDES:
            found[side].append(run_side(side, folder))
    fused, plain = (torch.load(folder / f"{side}.pt", weights_only=True) for side in SIDES)
    return {
        "cpu": median_ratio(found, "cpu_s"),
        "memory": median_ratio(found, "peak_bytes"),
        "loss_diff": relative_difference(fused["loss"], plain["loss"]),
        "gradient_diff": max(
            relative_difference(fused[name], plain[name]) for name in ("hidden", "weight")
        ),
        "sides": found,
    }


def run_side(side: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.head", "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def median_ratio(found: dict[str, list[dict[str, float]]], figure: str) -> float:
    pairs = zip(*(found[side] for side in SIDES), strict=True)
    return round(statistics.median(one[figure] / other[figure] for one, other in pairs), 3)


def relative_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def measure_side(side: str, folder: Path) -> dict[str, float]:
    """Return the CPU seconds and the peak memory of a pass."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    mask = torch.rand(TOKENS) < POLICY_SHARE
    advantages = torch.randn(TOKENS)
    compute = {"fused": fused_loss, "plain": plain_loss}[side]
    with PeakWatch() as watch:
        began = time.process_time()
        loss = compute(hidden, weight, targets, mask, advantages)
        loss.backward()
        cpu_s = time.process_time() - began
    torch.save(
        {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad},
        folder / f"{side}.pt",
    )
    return {"cpu_s": cpu_s, "peak_bytes": watch.peak_bytes}


def fused_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    wanted = advantages[mask]

    def objective(logprobs: Tensor, span: slice) -> Tensor:
        return -wanted[span] * torch.exp(logprobs - logprobs.detach())

    temperature = torch.ones(int(mask.sum()))
    loss, _, _ = fused_policy_loss(
        hidden[mask], weight, targets[mask], temperature, objective, chunk=CHUNK
    )
    return loss


def plain_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    log_probs = (hidden @ weight.t()).log_softmax(-1)
    logprobs = log_probs.gather(1, targets[:, None]).squeeze(1)
    losses = -advantages * torch.exp(logprobs - logprobs.detach())
    return (losses * mask).sum()


class PeakWatch:
    """Peak of resident memory while it is entered, above the memory before.

    It polls every few milliseconds, so that earlier peaks of the process do not count."""

    def __enter__(self) -> "PeakWatch":
        self._done = threading.Event()
        self._before = self._peak = resident_bytes()
        self._thread = threading.Thread(target=self._keep_looking)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        return self._peak - self._before

    def _keep_looking(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, resident_bytes())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
