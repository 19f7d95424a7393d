"""Low-rank adapters in place of full fine-tuning: `[learner.lora]`."""

from pydantic import Field, field_validator

from flotilla_common.spec.config import ConfigModel

ALL_LINEAR = "all-linear"


class LoraConfig(ConfigModel):
    """Matrices A [rank, in] and B [out, rank] beside each frozen weight W, which acts as
    W + alpha / rank * B A (arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1, le=4096)
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    # Accepted for specs from other trainers; must be 0.
    dropout: float = Field(default=0.0, ge=0, lt=1)
    # `all-linear`: every linear layer but the output head. Otherwise layer names or their ends:
    # `q_proj` is the query projection of every decoder layer.
    target_modules: str | tuple[str, ...] = ALL_LINEAR

    @field_validator("dropout")
    @classmethod
    def _none_is_dropped(cls, value: float) -> float:
        if value:
            raise ValueError(
                "engines sample without dropout, so with it every ratio of new to old"
                " probabilities is noise; leave it out"
            )
        return value

    @field_validator("target_modules")
    @classmethod
    def _something_is_targeted(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or (isinstance(value, tuple) and "" in value):
            raise ValueError(f'name at least one linear layer, or set it to "{ALL_LINEAR}"')
        return value
