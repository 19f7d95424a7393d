"""Weight updates in each vLLM worker process. vLLM imports this module by name.

`services/rollout/flotilla_rollout/work/weight_updater.py` decides when they are made."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_common.process.tied_children import end_with_parent
from flotilla_common.tensors.shared_buffers import identify_device
from flotilla_common.tensors.tensor_views import view_tensor
from flotilla_rollout.adapters.vllm_adapter import replace_adapter
from flotilla_rollout.adapters.vllm_copies import CheckRow, FileCopies
from flotilla_rollout.adapters.vllm_logprobs import correct_sampler
from flotilla_rollout.adapters.vllm_reload import WeightReload
from flotilla_rollout.adapters.vllm_routing import ExpertRecorder
from flotilla_rollout.adapters.vllm_transfer import register_transfer

# Name, dtype, shape, offset in bytes.
TensorRow = tuple[str, str, Sequence[int], int]

# vLLM imports this module in each worker before it makes the engine of its transfers.
register_transfer()


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`), hence without state of its own."""

    def end_with_rollout(self, rollout: int, between: Sequence[int]) -> None:
        """End this process when the rollout ends, however it ends; with it the processes `between`.

        A killed rollout would otherwise leave engines that hold their memory and serve no client.
        """
        if sys.platform != "linux":
            return
        end_with_parent()
        if os.getppid() != rollout:
            # Nothing ends the engine's core, this one's parent, where workers are its children.
            watched = [os.pidfd_open(pid) for pid in (rollout, *between)]
            threading.Thread(target=_end_after, args=watched, daemon=True).start()

    def correct_flotilla_logprobs(self) -> None:
        """Compute logprobs exactly on CPUs, whatever the vocabulary's size and the layers."""
        worker: Any = self
        if worker.device.type == "cpu":
            # It extends operators that vLLM has for CPUs only.
            from flotilla_rollout.adapters.vllm_linear_attention import extend_linear_attention

            correct_sampler(worker.model_runner.sampler)
            extend_linear_attention()

    def record_flotilla_experts(self, kept: int) -> None:
        """Record the experts of requests from now on; see `ExpertRecorder`.

        Of workers that share a model all choose the same: the first one records."""
        worker: Any = self
        if worker.rank == 0:
            worker.model_runner.flotilla_experts = ExpertRecorder(worker.model_runner, kept)

    def take_flotilla_experts(self, request_id: str) -> tuple[list[int], int, bytes] | None:
        """Return the experts of a request that has ended; see `ExpertRecorder.take_record`."""
        worker: Any = self
        recorder = getattr(worker.model_runner, "flotilla_experts", None)
        return recorder.take_record(request_id) if recorder is not None else None

    def measure_flotilla_memory(self) -> tuple[int, int, int]:
        """Return the most memory that this process has had, that its device has had in use by
        everybody there, and how large that device is; 0 of a CPU."""
        worker: Any = self
        if worker.device.type != "cuda":
            return peak_memory_bytes(), 0, 0
        free, total = torch.cuda.mem_get_info(worker.device)
        # Memory that torch has reserved and given back is unused now.
        back = torch.cuda.max_memory_reserved(worker.device) - torch.cuda.memory_reserved(
            worker.device
        )
        return peak_memory_bytes(), total - free + back, total

    def join_flotilla_machines(self) -> None:
        """Join the copies of files between the machines of an engine that spans several."""
        worker: Any = self
        worker.flotilla_copies = FileCopies(
            worker.rank, worker.vllm_config.parallel_config.world_size
        )

    def copy_flotilla_file(self, path: str, total_bytes: int, checks: Sequence[CheckRow]) -> str:
        """Have the first machine's file on all; see `FileCopies.copy_file`."""
        worker: Any = self
        return worker.flotilla_copies.copy_file(path, total_bytes, checks)

    def drop_flotilla_copy(self) -> None:
        """Remove the copy of the file, once all have loaded it."""
        worker: Any = self
        worker.flotilla_copies.drop()

    def identify_flotilla_device(self) -> str:
        """Return what names this worker's device in every process of the machine."""
        worker: Any = self
        return identify_device(worker.device)

    def load_flotilla_weights(self, path: str, total_bytes: int, rows: Sequence[TensorRow]) -> None:
        """Replace the model's weights by those in the file; between two engine steps only.

        All of it happens in one call, so that no step can see a model that is half loaded: layers
        lie on the meta device in between, and computing with those ends the engine.
        """
        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            reload = WeightReload(worker.get_model(), worker.model_config)
            reload.load_tensors(_map_tensors(_path_here(worker, path), total_bytes, rows))
        worker.weight_transfer_engine.torn = False

    def load_flotilla_adapter(
        self, path: str, total_bytes: int, rows: Sequence[TensorRow]
    ) -> list[str]:
        """Replace the adapter by that in the file; see `replace_adapter`."""
        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            tensors = _map_tensors(_path_here(worker, path), total_bytes, rows)
            return replace_adapter(worker.model_runner, tensors)

    def judge_flotilla_transfer(self) -> tuple[str, bool]:
        """Return why the last call of a transfer failed, or nothing, and whether layers of several
        policies lie beside each other."""
        worker: Any = self
        receiver = worker.weight_transfer_engine
        return receiver.failure, receiver.torn


def _end_after(rollout: int, *others: int) -> None:
    """Kill processes when another has ended; all are file descriptors."""
    ended = select.poll()
    ended.register(rollout, select.POLLIN)
    ended.poll()
    for other in others:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(other, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _path_here(worker: Any, path: str) -> str:
    """Return where the first machine's file is on this worker's."""
    copies: FileCopies | None = getattr(worker, "flotilla_copies", None)
    return copies.find(path) if copies is not None else path


def _map_tensors(
    path: str, total_bytes: int, rows: Sequence[TensorRow]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views into the mapped file."""
    data = torch.from_file(path, shared=True, size=total_bytes, dtype=torch.uint8)
    for name, dtype, shape, offset in rows:
        yield name, view_tensor(data, dtype, shape, offset)
