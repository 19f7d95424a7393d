"""Several ranks make the step that one makes, whatever the algorithm."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.rank.data_parallel import RankPlacement, Replicas
from flotilla_learner.types import StepResult, TrainBatch
from tests.support.lone_ranks import collect_reports
from tests.support.process_forge import ProcessForge
from tests.support.tiny_ranks import (
    changed,
    make_batch,
    make_prompted_batch,
    make_trainer,
    same_bits,
    trained_parameters,
)

Weights = dict[str, torch.Tensor]
Done = tuple[list[StepResult], Weights]
Change = Callable[[TrainBatch], TrainBatch]
Run = Callable[..., list[Done]]

EVERYTHING: dict[str, object] = {
    "advantage": "gae",
    "proximal": "trainer",
    "entropy_coefficient": 0.01,
    "epochs": 2,
    "mini_batches": 2,
    "kl": {"coefficient": 0.05},
    "correction": {"token_tis": 2.0, "sequence_mask_geometric": [0.5, 2.0]},
    "overlong": {"mask_above_tokens": 35, "soft_limit": 30, "soft_buffer": 20},
    "critic": {"lr": 1.0},
}
ALGORITHMS: dict[str, dict[str, object]] = {
    "plain": {},
    "coupled": {"loss": "gspo", "reduction": "sequence_mean"},
    "everything": EVERYTHING,
    "reward": {"advantage": "reinforce_pp", "kl": {"coefficient": 0.05, "place": "reward"}},
    # So many tokens that every rank holds some, by bounds that no rounding error crosses.
    "held": {
        "loss": "clip_cov",
        "clip_cov": {"share": 0.2, "low": -100, "high": 100},
        "epochs": 2,
        "mini_batches": 2,
    },
    "adapters": {
        "advantage": "gae",
        "kl": {"coefficient": 0.05},
        "critic": {"lr": 1.0},
        "lora": {"rank": 4, "alpha": 8},
    },
}


@pytest.fixture(scope="module")
def run(rank_forge: ProcessForge) -> Iterator[Run]:
    """`ranks`, called in a process that has no threads of gRPC: these may crash a forked child."""
    with subprocess.Popen(
        rank_forge.python_command("-m", __name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    ) as process:
        requests, output = process.stdin, process.stdout
        assert requests is not None and output is not None

        def call(*arguments: Any) -> list[Done]:
            pickle.dump(arguments, requests)
            requests.flush()
            return pickle.load(output)

        yield call
        process.kill()


def main() -> None:
    with os.fdopen(os.dup(1), "wb") as answers:
        # Whatever a library prints is no answer.
        os.dup2(2, 1)
        with suppress(EOFError):
            while True:
                pickle.dump(ranks(*pickle.load(sys.stdin.buffer)), answers)
                answers.flush()


def equal(batch: TrainBatch) -> TrainBatch:
    return changed(batch, reward=1.0)


def as_it_is(batch: TrainBatch) -> TrainBatch:
    return batch


def prompted(batch: TrainBatch) -> TrainBatch:
    """Groups with a prompt each, two in a mini-batch: of three ranks some share a group."""
    return make_prompted_batch(groups=4, size=3)


def poisoned(batch: TrainBatch) -> TrainBatch:
    first = batch.sequences[0]
    bad = replace(first, behaviour_logprobs=first.token_ids * np.nan)
    return replace(batch, sequences=(bad, *batch.sequences[1:]))


def work(folder: Path, algorithm: Mapping[str, object], replicas: Replicas, change: Change) -> Done:
    """Two steps of one rank, and what it holds then, its critic included.

    The algorithm's `lora` is that of the learner."""
    lora = algorithm.get("lora")
    plain = {name: value for name, value in algorithm.items() if name != "lora"}
    policy, _, trainer = make_trainer(
        folder,
        algorithm=AlgorithmConfig.model_validate(plain),
        lora=None if lora is None else LoraConfig.model_validate(lora),
        replicas=replicas,
        # Adam divides a gradient by its own size, rounding errors too; not with this.
        eps=1.0,
    )
    batch = change(make_batch(policy, shift=0.2))
    # A larger rate multiplies rounding errors in what is computed after the first update.
    results = [trainer.train_step(replace(batch, step=step), lr=0.1) for step in (1, 2)]
    critic = trainer.critic.state_tensors() if trainer.critic is not None else {}
    # Of another process only plain arrays come back.
    held = {**trained_parameters(policy), **critic}
    return [replace(result, seconds=0.0) for result in results], held


def child(place: RankPlacement, pipe: Connection, task: Callable[[Replicas], Done]) -> None:
    torch.set_num_threads(1)
    results, held = task(Replicas.join_process_group(place, torch.device("cpu")))
    pipe.send((results, {name: value.numpy() for name, value in held.items()}))


def place(index: int, count: int, file: Path) -> RankPlacement:
    """All on this machine."""
    return RankPlacement(
        index=index, count=count, rendezvous=f"file://{file}", slot=index, slots=count
    )


def ranks(
    count: int,
    tmp_path: Path,
    folder: Path,
    algorithm: Mapping[str, object],
    change: Change = as_it_is,
) -> list[Done]:
    """Return what each of `count` ranks did. They are forked: torch is loaded once."""

    def task(replicas: Replicas) -> Done:
        return work(folder, algorithm, replicas, change)

    if count == 1:
        return [task(Replicas())]
    context = multiprocessing.get_context("fork")
    rendezvous = tmp_path / f"rendezvous-{len(list(tmp_path.iterdir()))}"

    def make_rank(index: int, report: Connection) -> ForkProcess:
        return context.Process(target=child, args=(place(index, count, rendezvous), report, task))

    found = collect_reports(count, make_rank)
    return [
        (results, {name: torch.from_numpy(value) for name, value in held.items()})
        for results, held in found
    ]


@pytest.mark.parametrize(
    ("name", "counts"),
    # Three have unequal shares, whatever the algorithm.
    [
        pytest.param("plain", (2, 3), marks=pytest.mark.slow),
        ("coupled", (3,)),
        ("everything", (3,)),
        ("reward", (3,)),
        ("held", (3,)),
    ],
)
def test_neither_loss_nor_update_depends_on_the_number_of_ranks(
    model_folder: Path, tmp_path: Path, run: Run, name: str, counts: tuple[int, ...]
) -> None:
    ((alone, held),) = run(1, tmp_path, model_folder, ALGORITHMS[name])
    for count in counts:
        first, *others = run(count, tmp_path, model_folder, ALGORITHMS[name])
        for results, weights in others:
            assert results == first[0]
            assert same_bits(weights, first[1])
        for ours, theirs in zip(first[0], alone, strict=True):
            assert ours.metrics["policy/loss"] == pytest.approx(
                theirs.metrics["policy/loss"], abs=1e-6
            )
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-6)
            assert ours.histograms.keys() == theirs.histograms.keys()
            tokens = [[v.tokens for v in result.versions.values()] for result in (ours, theirs)]
            assert tokens[0] == tokens[1]
        for key, value in held.items():
            torch.testing.assert_close(first[1][key], value, rtol=0, atol=2e-6)


def test_nor_where_groups_share_their_prompts(model_folder: Path, tmp_path: Path, run: Run) -> None:
    # No prompt is short enough for what it has of overlong ones.
    algorithm = {name: value for name, value in EVERYTHING.items() if name != "overlong"}
    ((alone, held),) = run(1, tmp_path, model_folder, algorithm, prompted)
    first, *_ = run(3, tmp_path, model_folder, algorithm, prompted)
    for ours, theirs in zip(first[0], alone, strict=True):
        share = "policy/shared_prompt_share"
        # A prompt whose group is split between ranks is computed by each.
        assert 0.1 < ours.metrics[share] < theirs.metrics[share]
        ours, theirs = (
            {name: value for name, value in result.metrics.items() if name != share}
            for result in (ours, theirs)
        )
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for key, value in held.items():
        torch.testing.assert_close(first[1][key], value, rtol=0, atol=2e-6)


def test_two_runs_of_as_many_ranks_give_the_same_bits(
    model_folder: Path, tmp_path: Path, run: Run
) -> None:
    left, right = (run(2, tmp_path, model_folder, EVERYTHING)[0] for _ in range(2))
    assert left[0] == right[0]
    assert same_bits(left[1], right[1])


def test_what_is_not_finite_on_one_rank_is_refused_on_all(
    model_folder: Path, tmp_path: Path, run: Run
) -> None:
    algorithm = {"advantage": "gae"}
    ((_, untouched),) = run(1, tmp_path, model_folder, algorithm, poisoned)
    for results, weights in run(2, tmp_path, model_folder, algorithm, poisoned):
        assert [result.skipped for result in results] == [True, True]
        assert same_bits(weights, untouched)


@pytest.mark.parametrize("count", [1, 3])
def test_where_nothing_has_a_gradient_all_ranks_do_nothing(
    model_folder: Path, tmp_path: Path, run: Run, count: int
) -> None:
    for results, _ in run(count, tmp_path, model_folder, {}, equal):
        assert [r.metrics["policy/updates"] for r in results] == [0.0, 0.0]
        assert not any(result.skipped for result in results)


def test_with_fewer_sequences_than_ranks_some_compute_nothing() -> None:
    shares = [Replicas(index, 4).assign_sequences([5, 9, 7]) for index in range(4)]
    assert shares == [[1], [2], [0], []]


def test_the_longest_sequences_are_spread() -> None:
    lengths = [100, 1, 2, 90, 20, 30]
    shares = [Replicas(index, 2).assign_sequences(lengths) for index in range(2)]
    assert [sum(lengths[i] for i in share) for share in shares] == [122, 121]


if __name__ == "__main__":
    main()
