"""Parts of a model that a rank keeps off its computing device."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from flotilla_learner.rank.sharding import ShardLayout
from flotilla_learner.rank.split_loading import find_tensor_files, make_empty_model, read_parts
from tests.support.tiny_ranks import write_model


class PartsElsewhere(ShardLayout):
    """A split with its parts in host memory, and a computing device that holds no numbers."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    @property
    def home(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def layout(tmp_path: Path) -> Generator[ShardLayout]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield PartsElsewhere(mesh, torch.float32)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_parts_that_are_kept_off_the_device_stay_there(
    layout: ShardLayout, tmp_path: Path, tied: bool
) -> None:
    folder = write_model(tmp_path / "model", tied=tied)
    model = make_empty_model(AutoConfig.from_pretrained(folder), {"dtype": torch.float32})
    layout.split_module(model)
    read_parts(model, find_tensor_files(folder), layout)
    parts = dict(model.named_parameters())
    assert parts and all(isinstance(part, DTensor) for part in parts.values())
    assert {part.device.type for part in parts.values()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
