"""Parameters of LoRA adapters, from a decoder's size. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.launcher.doctor.model_size import ModelSize

# As PEFT and the learner name it: each linear layer but the head.
_ALL = "all-linear"


def adapter_parameters(model: ModelSize, lora: Mapping[str, Any]) -> int:
    """Return the parameters of the adapters under `[learner.lora]`.

    More than there are for a mixture, whose experts get none. A layer of a name that is not common
    counts as the largest that is."""
    sizes = {name: sum(shape) for name, shape in _linear_shapes(model).items()}
    wanted = lora["target_modules"]
    targets: Iterable[str] = (wanted,) if isinstance(wanted, str) else wanted
    ends = sizes if wanted == _ALL else [target.rpartition(".")[2] for target in targets]
    return lora["rank"] * model.layers * sum(sizes.get(end, max(sizes.values())) for end in ends)


def merging_bytes(model: ModelSize) -> int:
    """Return what it takes for a moment to merge the largest layer's adapter into it: base, change
    and sum in float32."""
    return 3 * 4 * max(rows * columns for rows, columns in _linear_shapes(model).values())


def _linear_shapes(model: ModelSize) -> dict[str, tuple[int, int]]:
    """Return the shapes of a block's linear layers by the names that most models give them."""
    hidden, wide = model.hidden, model.intermediate
    queries = (model.heads * model.head_dim) or hidden
    keys = model.kv_heads * model.head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (wide, hidden),
        "up_proj": (wide, hidden),
        "down_proj": (hidden, wide),
    }
