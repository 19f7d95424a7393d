"""Families of published models, as the rollout's renderers know them."""


def find_family(model: str) -> str:
    """Return the family that `rollout.dialect.name = "auto"` plays a model of the hub by; "" for
    others, and where the rollout's packages are not installed."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return ""
    return MODEL_RENDERER_MAP.get(model, "")
