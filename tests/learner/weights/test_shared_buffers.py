"""Buffers that are opened by another process's description, after a check of it."""

import json
import os
from pathlib import Path

import pytest
import torch

from flotilla_common.tensors.shared_buffers import (
    BufferOffer,
    BufferPool,
    CudaHandle,
    HostHandle,
    find_devices,
    identify_device,
    read_offer,
)

CPU = torch.device("cpu")
SIZE = 4096
MEMORY = bytes(range(191, 256))


def pool() -> BufferPool:
    return BufferPool({identify_device(CPU): CPU}, SIZE)


def offered(**changes: object) -> str:
    """An offer of a buffer that is there, with other fields."""
    buffer = pool().take_buffer(identify_device(CPU))
    return json.dumps({"handles": [buffer.handle.model_dump() | changes], "refusal": ""})


def cuda_handle(**changes: object) -> dict[str, object]:
    right = CudaHandle(
        size=SIZE,
        memory=MEMORY,
        offset=0,
        counter="/torch_8293_2583893351_0",
        counter_offset=1,
        event=b"e" * 64,
        has_event=True,
    )
    return json.loads(right.model_dump_json()) | changes


def test_what_one_side_writes_the_other_reads() -> None:
    buffer = pool().take_buffer(identify_device(CPU))
    offer = BufferOffer(handles=[buffer.handle], meeting="there-1")
    [opened], meeting = read_offer(offer.model_dump_json(), SIZE, CPU)
    assert meeting == "there-1"
    buffer.data.copy_(torch.arange(SIZE) % 251)
    assert torch.equal(opened, (torch.arange(SIZE) % 251).to(torch.uint8))


def test_buffers_that_are_given_back_are_lent_again_and_no_others_made() -> None:
    lending, here = pool(), identify_device(CPU)
    first, second = lending.take_buffer(here), lending.take_buffer(here)
    assert first.handle != second.handle
    lending.give_back(here, first)
    assert lending.take_buffer(here) is first
    with pytest.raises(RuntimeError, match="the engine's device GPU-1 is none of the sender's"):
        lending.take_buffer("GPU-1")


def test_every_process_names_the_memory_of_its_host_alike() -> None:
    assert find_devices()[identify_device(CPU)] == CPU


def test_a_handle_of_a_gpu_reads_as_it_was_written() -> None:
    text = json.dumps({"handles": [cuda_handle()]})
    [read] = BufferOffer.model_validate_json(text).handles
    assert isinstance(read, CudaHandle)
    assert (read.memory, read.event) == (MEMORY, b"e" * 64)
    with pytest.raises(RuntimeError, match="offered buffer is on cuda, but this process uses cpu"):
        read_offer(text, SIZE, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"descriptor": "3"},
        {"descriptor": -1},
        {"descriptor": 10**6},
        {"pid": 1.5},
        {"more": 1},
        {"kind": "other"},
        {"size": SIZE + 1},
    ],
    ids=str,
)
def test_a_handle_with_any_odd_field_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match=r"cannot open the offered|the offered buffers have"):
        read_offer(offered(**changes), SIZE, CPU)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"handles": 1}',
        '{"meeting": "/run/other.sock"}',
        json.dumps({"handles": [cuda_handle(counter="/../etc/passwd")]}),
        json.dumps({"handles": [cuda_handle(counter_offset=10_000)]}),
        json.dumps({"handles": [cuda_handle(memory="bQ==")]}),
        json.dumps({"handles": [cuda_handle(event="ZQ==")]}),
        json.dumps({"handles": [cuda_handle(offset=-1)]}),
    ],
)
def test_what_is_no_offer_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match="cannot open the offered buffers"):
        read_offer(text, SIZE, CPU)


def test_no_other_file_of_the_sender_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(SIZE))
    descriptor = os.open(path, os.O_RDWR)
    try:
        handle = HostHandle(size=SIZE, pid=os.getpid(), descriptor=descriptor)
        with pytest.raises(RuntimeError, match="is not a buffer"):
            read_offer(BufferOffer(handles=[handle]).model_dump_json(), SIZE, CPU)
    finally:
        os.close(descriptor)


def test_a_buffer_of_another_size_is_refused() -> None:
    text = offered(size=2 * SIZE)
    with pytest.raises(RuntimeError, match="does not have 8192 bytes"):
        read_offer(text, 2 * SIZE, CPU)


def test_why_none_are_offered_is_logged_on_the_other_side() -> None:
    with pytest.raises(RuntimeError, match="none of the sender's"):
        read_offer(BufferOffer(refusal="none of the sender's").model_dump_json(), SIZE, CPU)
