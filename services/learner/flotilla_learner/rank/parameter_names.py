"""Names of a model's parameters, with or without adapters."""

from collections.abc import Mapping

from torch import nn

ADAPTER_MATRICES = ("lora_A", "lora_B")


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters without adapters, by their names in a model without adapters."""
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in named.items()
        if not any(f".{kind}." in name for kind in ADAPTER_MATRICES)
    }
