"""Over which backend a worker's engine is sent weights."""

import pytest
from pydantic import ValidationError

from flotilla_learner.config.learner import WeightsConfig
from flotilla_learner.weights.transfer_choice import choose_transfer

ON_GPU = ("nccl", "ipc", "gloo", "shm", "grpc")
ON_CPU = ("ipc", "gloo", "shm", "grpc")


def chosen(
    transfer: str,
    offered: tuple[str, ...],
    *,
    near: bool,
    ids: bool = True,
    gpu: bool = True,
    network: str = "private",
) -> str | None:
    config = WeightsConfig.model_validate({"transfer": transfer, "network": network})
    return choose_transfer(
        config, offered, shares_memory=near, has_device_ids=ids, sends_from_gpu=gpu
    )


@pytest.mark.parametrize("transfer", ["auto", "ipc"])
def test_engines_elsewhere_are_sent_weights_over_nccl_between_gpus_and_gloo_else(
    transfer: str,
) -> None:
    assert chosen(transfer, ON_GPU, near=False) == "nccl"
    assert chosen(transfer, ON_CPU, near=False) == "gloo"
    assert chosen(transfer, ON_GPU, near=False, gpu=False) == "gloo"
    assert chosen(transfer, ("shm", "grpc"), near=False) is None


def test_an_engine_that_shares_memory_is_sent_none_unless_configured() -> None:
    assert chosen("auto", ON_GPU, near=True) is None
    assert chosen("ipc", ON_GPU, near=True) == "ipc"
    assert chosen("ipc", ON_CPU, near=True, gpu=False) == "ipc"
    assert chosen("nccl", ON_GPU, near=True) == "nccl"
    assert chosen("gloo", ON_GPU, near=True) == "gloo"


def test_an_engine_whose_devices_are_not_known_reads_shared_memory() -> None:
    assert chosen("ipc", ON_GPU, near=True, ids=False) is None
    assert chosen("ipc", ("nccl", "gloo", "shm"), near=True) is None


def test_what_is_wanted_and_not_offered_is_not_chosen() -> None:
    assert chosen("nccl", ON_CPU, near=False) is None
    assert chosen("off", ON_GPU, near=False) is None


def test_over_a_public_network_none_are_sent() -> None:
    assert chosen("auto", ON_GPU, near=False, network="public") is None
    for transfer in ("gloo", "nccl", "ipc"):
        with pytest.raises(ValidationError, match="neither encrypts nor authenticates"):
            chosen(transfer, ON_GPU, near=False, network="public")
