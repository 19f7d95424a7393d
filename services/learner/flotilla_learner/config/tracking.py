"""Destinations of metrics: `[learner.tracking]`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import MOST_STEPS

Backend = Literal["jsonl", "console", "wandb", "tensorboard", "trackio", "mlflow"]


class TrackingConfig(ConfigModel):
    """Trackers of a run, and the names under which they file it."""

    # `jsonl` writes metrics.jsonl, which `flotilla train` draws its curve from.
    backends: tuple[Backend, ...] = ("jsonl", "console")
    # For wandb and trackio; the experiment in mlflow.
    project: str = Field(default="fleet-task-grpo", pattern=r"^[^/\\#?%:\s]{1,128}$")
    # wandb only.
    entity: str | None = None
    group: str | None = None
    # For wandb and mlflow.
    tags: tuple[str, ...] = ()
    # wandb only. `auto` goes offline without a key or a network; `online` then refuses to start.
    mode: Literal["auto", "online", "offline"] = "auto"
    # wandb only: steps between tables of sampled episodes, with their texts; 0: none.
    episodes_every: int = Field(default=10, ge=0, le=MOST_STEPS)

    @model_validator(mode="after")
    def _no_backend_twice(self) -> Self:
        if len(set(self.backends)) < len(self.backends):
            raise ValueError(f"backends: list each once; got {list(self.backends)}")
        return self
