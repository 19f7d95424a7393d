"""Ports of the front door: who trains and who samples, in its own terms."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from services.tinker.types import (
        AdamSettings,
        BaseFacts,
        EngineFacts,
        Kind,
        LoadOrder,
        LossBatch,
        LossResult,
        ModelSettings,
        Result,
        SampleOrder,
        SampleResult,
        SamplerWeights,
        SaveOrder,
    )


class OrderRefused(Exception):
    """The trainer or sampler refuses what a client asked for: the client's fault."""


class Unknown(Exception):
    """The trainer does not hold the model, or the engine the sampler: it was restarted."""


class OutOfOrder(Exception):
    """The operation is not the model's next one."""


class Unavailable(Exception):
    """The peer is away or was lost on the way: try again."""


class TrainingPeer(Protocol):
    """The learner's TrainingService: see training_service.proto for each call's rules.

    Every method raises OrderRefused, Unknown, OutOfOrder and Unavailable."""

    async def describe_base(self) -> "BaseFacts": ...

    async def create_model(self, model_id: str, settings: "ModelSettings") -> int:
        """Return the number of the model's newest operation: 0 for a new one."""
        ...

    async def delete_model(self, model_id: str) -> None: ...

    async def forward_backward(
        self, model_id: str, number: int, batch: "LossBatch"
    ) -> "LossResult":
        """Accumulate a gradient; with `forward_only` the number is ignored."""
        ...

    async def apply_update(
        self, model_id: str, number: int, settings: "AdamSettings"
    ) -> "Mapping[str, float]": ...

    async def save_state(self, model_id: str, number: int, folder: str) -> int:
        """Write weights and optimizer into a new folder; return its bytes. Not an operation."""
        ...

    async def load_state(
        self, model_id: str, number: int, folder: str, *, with_optimizer: bool
    ) -> None: ...

    async def export_weights(self, model_id: str, number: int, folder: str) -> int:
        """Write weights for samplers into a new folder; return its bytes. Not an operation."""
        ...


class SamplingPeer(Protocol):
    """The rollout's SamplingService: see sampling_service.proto.

    Every method raises OrderRefused, Unknown and Unavailable; cancelling ends a request."""

    async def describe_engine(self) -> "EngineFacts": ...

    async def open_sampler(self, sampler_id: str, weights: "SamplerWeights") -> None: ...

    async def replace_weights(self, sampler_id: str, weights: "SamplerWeights") -> None: ...

    async def close_sampler(self, sampler_id: str) -> None: ...

    async def sample(self, sampler_id: str, order: "SampleOrder") -> "SampleResult": ...


class OrderWire(Protocol):
    """Reads the bodies of orders and writes their results: the functions of `wire/`.

    A body is what was accepted: the readers may raise anything for another."""

    def read_forward_backward(self, body: bytes) -> "LossBatch": ...

    def write_loss_result(self, result: "LossResult", batch: "LossBatch") -> bytes: ...

    def read_create_model(self, body: bytes) -> "ModelSettings": ...

    def read_optim_step(self, body: bytes) -> "AdamSettings": ...

    def read_save(self, body: bytes) -> "SaveOrder": ...

    def read_load(self, body: bytes) -> "LoadOrder": ...

    def read_sample(self, body: bytes) -> "tuple[str, SampleOrder]":
        """Return the sampler's id, or the path or base model to sample from, and the order."""
        ...

    def write_sample_result(self, result: "SampleResult", order: "SampleOrder") -> "Result": ...

    def write_json(self, kind: "Kind", **fields: "Any") -> "Result": ...
