"""LoRA by PEFT: only small matrices beside frozen weights are trained.

The base is kept as engines first receive it: matrices in their compute dtype, which halves it in
bfloat16. It gets no updates, so nothing below the precision of that dtype is lost."""

import hashlib
import math
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flotilla_learner.config.lora import ALL_LINEAR, LoraConfig
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.parameter_names import ADAPTER_MATRICES
from flotilla_learner.rank.sharding import gather_tensor, local_tensor, split_like, with_part
from flotilla_learner.rank.text_part import find_tower

if TYPE_CHECKING:
    from flotilla_learner.rank.merged_linear import MergedLinear

ADAPTER, CRITIC_ADAPTER, REFERENCE_ADAPTER = "default", "critic", "reference"
# Prefix of a module's name in PEFT's own files.
FILE_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of a model, and the layers that have them."""

    config: LoraConfig
    # By the name of the original linear layer.
    layers: Mapping[str, "MergedLinear"]
    # Merged into the weights that engines receive; otherwise they receive only the adapters.
    merged: bool = True
    # The policy's own; layers may have others as well.
    own: str = ADAPTER

    def named_parameters(self, adapter: str | None = None) -> dict[str, nn.Parameter]:
        """Parameters by name, as in PEFT's files: `{layer}.lora_A.weight`; by default the own
        adapter's."""
        chosen = adapter or self.own
        return {
            f"{name}.{kind}.weight": matrix
            for name, layer in self.layers.items()
            for kind, matrix in zip(ADAPTER_MATRICES, layer.adapter_matrices(chosen), strict=True)
        }

    def file_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in PEFT's files."""
        return {FILE_PREFIX + name: value for name, value in self.named_parameters().items()}

    @torch.no_grad()
    def merge(self, name: str, base: Tensor) -> Tensor:
        """Return the parameter that engines receive for the base parameter of this name.

        Collective for split parameters: each rank gets its part."""
        from flotilla_learner.rank.merged_linear import merge_weight

        layer = self.layers.get(name.removesuffix(".weight"))
        if layer is None or not name.endswith(".weight"):
            return base
        down, up = layer.adapter_matrices(self.own)
        # Rows of B are split like those of the weight.
        merged = merge_weight(
            local_tensor(base), gather_tensor(down), local_tensor(up), layer.scaling[self.own]
        )
        return with_part(base, merged)

    def scale(self, name: str, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the adapter's matrix as engines receive it without merging: B is multiplied by
        alpha / rank, so that B A is what they add."""
        from flotilla_learner.rank.merged_linear import scale_up

        is_up = name.endswith(f".{ADAPTER_MATRICES[1]}.weight")
        return scale_up(matrix, self._factor, dtype) if is_up else matrix

    def unscale(self, name: str, matrix: Tensor) -> Tensor:
        """Invert `scale`: return the adapter's own matrix, in float32."""
        is_up = name.endswith(f".{ADAPTER_MATRICES[1]}.weight")
        return matrix.float() / self._factor if is_up else matrix.float()

    @property
    def _factor(self) -> float:
        return self.config.alpha / self.config.rank

    def add(self, model: Any, adapter: str) -> None:
        """Add a further adapter to the layers unless they have it; the model must not be split."""
        if any(adapter not in layer.lora_A for layer in self.layers.values()):
            _inject(model, self.config, list(self.layers), adapter, merged=self.merged)

    @contextmanager
    def used(self, adapter: str | None, layers: Iterable[str] | None = None) -> Generator[None]:
        """Have layers, by default all, use another adapter, or none, while the context lasts."""
        names = self.layers if layers is None else [name for name in layers if name in self.layers]
        before = {name: self.layers[name].used_adapter for name in names}
        try:
            for name in names:
                self.layers[name].used_adapter = adapter
            yield
        finally:
            for name, own in before.items():
                self.layers[name].used_adapter = own

    @torch.no_grad()
    def reset(self, adapter: str | None = None, seed: int | None = None) -> None:
        """Set the adapter to its initial values, equal on all ranks: the policy is the base's.

        A is uniform and B zero, as in PEFT. They depend on the seed, or else the adapter's name."""
        source = (adapter or self.own) if seed is None else seed
        for name, parameter in self.named_parameters(adapter).items():
            whole = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                seed = int.from_bytes(hashlib.sha256(f"{source} {name}".encode()).digest()[:7])
                bound = 1 / math.sqrt(parameter.shape[1])
                whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
            part = local_tensor(split_like(parameter, whole.to(parameter.device)))
            local_tensor(parameter).copy_(part)

    def peft_config(self) -> Any:
        """Return PEFT's configuration of them."""
        return _peft_config(self.config, list(self.layers))


def add_adapters(
    model: Any,
    config: LoraConfig,
    dtype: torch.dtype,
    names: Iterable[str] = (ADAPTER,),
    *,
    merged: bool = True,
) -> Adapters:
    """Freeze the model, and add adapters without values yet: see `Adapters.reset`.

    The first one is active. Raises ModelError for a layer that cannot have one."""
    freeze_model(model, dtype)
    chosen = _target_layers(model, config)
    for name in names:
        _inject(model, config, chosen, name, merged=merged)
    return Adapters(config, {name: model.get_submodule(name) for name in chosen}, merged)


def add_separate_adapter(
    model: Any, config: LoraConfig, layers: Iterable[str], name: str, seed: int
) -> Adapters:
    """Add one more adapter, with its initial values, to these layers of a frozen model.

    It is unused but in `Adapters.used`, and computes what engines that receive it alone compute."""
    layers = list(layers)
    _inject(model, config, layers, name, merged=False)
    added = Adapters(config, {each: model.get_submodule(each) for each in layers}, False, name)
    for layer in added.layers.values():
        layer.used_adapter = None
    added.reset(seed=seed)
    _have_all_trained(model)
    return added


def remove_adapter(model: Any, adapters: Adapters) -> None:
    """Remove what `add_separate_adapter` has added; the layers keep their other adapters."""
    with warnings.catch_warnings():
        # It activates another one, which has no meaning here.
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        for layer in adapters.layers.values():
            layer.delete_adapter(adapters.own)
    del model.peft_config[adapters.own]
    _have_all_trained(model)


def _have_all_trained(model: nn.Module) -> None:
    """PEFT allows one adapter to train at a time, whenever one is added or removed."""
    for name, parameter in model.named_parameters():
        if any(f".{kind}." in name for kind in ADAPTER_MATRICES):
            parameter.requires_grad_(True)


def _inject(
    model: Any, config: LoraConfig, layers: Iterable[str], name: str, *, merged: bool
) -> None:
    from peft import inject_adapter_in_model

    from flotilla_learner.rank.merged_linear import MergedLinear, SeparateLinear

    settings = _peft_config(config, layers)
    settings._register_custom_module({nn.Linear: MergedLinear if merged else SeparateLinear})
    with warnings.catch_warnings():
        # A second adapter is intended.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(settings, model, name, low_cpu_mem_usage=True)
    for layer in layers:
        _make_room(model.get_submodule(layer), name)


def freeze_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Freeze the model, and cast the weights that autocast would cast anyway.

    Those are matrices, but no embeddings or norms."""
    model.eval()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim >= 2 and id(parameter) not in embeddings:
            parameter.data = parameter.data.to(dtype)


def _make_room(layer: "MergedLinear", adapter: str) -> None:
    """Allocate memory for the adapter, in float32, unless the base itself has none yet."""
    base: Any = layer.get_base_layer()
    for matrices in (layer.lora_A, layer.lora_B):
        matrices[adapter].float().to_empty(device=base.weight.device)
        # PEFT allows one adapter to train at a time.
        matrices.requires_grad_(True)


def linear_layers(model: Any) -> list[str]:
    """Return the names of the layers of a model without adapters that may get one: none of what
    reads pictures."""
    tower = find_tower(model)
    others = {id(model.get_output_embeddings()), *(map(id, tower.modules()) if tower else ())}
    return [
        name for name, m in model.named_modules() if type(m) is nn.Linear and id(m) not in others
    ]


def _target_layers(model: Any, config: LoraConfig) -> list[str]:
    """Return the names of the layers that get an adapter. Raises ModelError."""
    linear = linear_layers(model)
    wanted = config.target_modules
    if wanted == ALL_LINEAR:
        if not linear:
            raise ModelError("learner.lora: the model has no linear layers besides its head")
        return linear
    targets = (wanted,) if isinstance(wanted, str) else wanted
    for target in targets:
        if not any(_is_named(name, target) for name in linear):
            raise ModelError(_describe_target(model, target, linear))
    return [name for name in linear if any(_is_named(name, target) for target in targets)]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _describe_target(model: nn.Module, target: str, linear: Iterable[str]) -> str:
    """Explain why nothing of that name can have an adapter, and what can."""
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    other = {
        "an expert's weight, and these are no linear layers": [
            name for name, _ in model.named_parameters() if ".experts" in name
        ],
        "no linear layer of the body": [name for name, _ in model.named_modules()],
    }
    why = next(
        (what for what, names in other.items() if any(_has_part(name, target) for name in names)),
        "no module of this model",
    )
    return f"learner.lora.target_modules: {target!r} is {why}; choose of {', '.join(kinds)}"


def _has_part(name: str, target: str) -> bool:
    return f".{target}." in f".{name}."


def _peft_config(config: LoraConfig, layers: Iterable[str]) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=list(layers),
        bias="none",
        task_type="CAUSAL_LM",
    )
