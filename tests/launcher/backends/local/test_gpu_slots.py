"""GPUs of this machine, shared out among replicas."""

import pytest

from services.launcher.backends.local.gpu_slots import GpuSlots
from services.launcher.backends.ports import BackendError


def test_gpus_are_shared_out_without_overlap_and_come_back() -> None:
    slots = GpuSlots(["0", "1", "2"])
    assert slots.take_gpus("a", 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert slots.take_gpus("nothing", 0) == {}
    with pytest.raises(BackendError, match="b needs 2 GPUs, 1 are free"):
        slots.take_gpus("b", 2)
    slots.release_gpus("a")
    assert slots.take_gpus("b", 3) == {"CUDA_VISIBLE_DEVICES": "0,1,2"}
