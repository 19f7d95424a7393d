"""Destinations of metrics: `[learner.tracking]`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.config import ConfigModel

Backend = Literal["jsonl", "console", "wandb", "tensorboard"]


class TrackingConfig(ConfigModel):
    """The trackers of a run, and the settings of wandb."""

    # `jsonl` writes metrics.jsonl, which `flotilla train` draws its curve from.
    backends: tuple[Backend, ...] = ("jsonl", "console")
    # The rest is wandb's own.
    project: str = Field(default="fleet-task-grpo", pattern=r"^[^/\\#?%:\s]{1,128}$")
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    # `auto` goes offline without a key or a network; `online` refuses to start then.
    mode: Literal["auto", "online", "offline"] = "auto"

    @model_validator(mode="after")
    def _no_backend_twice(self) -> Self:
        if len(set(self.backends)) < len(self.backends):
            raise ValueError(f"backends: each once, got {list(self.backends)}")
        return self
