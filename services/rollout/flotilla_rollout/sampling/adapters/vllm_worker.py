"""Weights of samplers in each vLLM worker process. vLLM imports this module by name."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import replace_submodule

from flotilla_rollout.adapters.vllm_adapter import build_adapter, install_adapter, list_layers
from flotilla_rollout.adapters.vllm_reload import WeightReload
from flotilla_rollout.adapters.vllm_weights import WeightLoader


class SamplerLoader(WeightLoader):
    """Mixed into vLLM's worker class (`worker_extension_cls`), hence without state of its own."""

    def correct_flotilla_adapters(self) -> None:
        """Compute each token's own adapter on CPUs."""
        worker: Any = self
        if worker.device.type == "cpu":
            # It needs operators that vLLM has for CPUs only.
            from flotilla_rollout.sampling.adapters.vllm_cpu_adapters import correct_adapters

            correct_adapters(worker.model_runner.lora_manager._adapter_manager)

    def stage_flotilla_adapter(self, number: int, folder: str, path: str) -> list[str]:
        """Read an adapter from its folder and file, for `install_flotilla_adapter`; return its
        layers that this engine does not have. Raises ValueError for what vLLM does not compute."""
        worker: Any = self
        runner = worker.model_runner
        settings = PEFTHelper.from_local_dir(folder, None)
        settings.validate_legal(runner.lora_manager.lora_config)
        adapter = build_adapter(runner, number, dict(_read_tensors([path])), settings)
        worker.flotilla_staged = adapter
        return sorted(adapter.loras.keys() - list_layers(runner))

    def install_flotilla_adapter(self) -> None:
        """Use the staged adapter from the next step on, in place of an older one with its
        number."""
        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            install_adapter(worker.model_runner, worker.flotilla_staged)
        worker.flotilla_staged = None

    def remove_flotilla_adapter(self, number: int) -> None:
        worker: Any = self
        worker.model_runner.lora_manager._adapter_manager.remove_adapter(number)

    def load_flotilla_model(self, paths: Sequence[str]) -> None:
        """Replace the model's weights by those in the files; between two engine steps only.

        All of it happens in one call, so that no step can see a model that is half loaded."""
        worker: Any = self
        with set_current_vllm_config(worker.vllm_config), _bare_layers(worker.model_runner):
            reload = WeightReload(worker.get_model(), worker.model_config)
            reload.load_tensors(_read_tensors(paths))


@contextmanager
def _bare_layers(runner: Any) -> Generator[None]:
    """Put the layers in the places of those that vLLM has wrapped to add adapters, so that weights
    find them by their names in files."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        yield
        return
    model, wrapped = manager._adapter_manager.model, manager._adapter_manager.modules
    for name, layer in wrapped.items():
        replace_submodule(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped.items():
            replace_submodule(model, name, layer)


def _read_tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
