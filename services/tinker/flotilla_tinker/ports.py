"""Ports of the front door: who trains and who samples, in its own terms."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from flotilla_tinker.types import (
        Accepted,
        AdamSettings,
        BaseFacts,
        CheckpointRecord,
        ClientOrder,
        EngineFacts,
        Failure,
        Kind,
        LoadOrder,
        LossBatch,
        LossResult,
        ModelRecord,
        ModelSettings,
        Pending,
        Result,
        SampleOrder,
        SampleResult,
        SamplerRecord,
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


class FrontDesk(Protocol):
    """What the HTTP calls need of `work/desk.py`. Every method raises the errors of
    `work/desk_errors.py`; what belongs to another tenant is unknown."""

    async def facts(self) -> "tuple[BaseFacts, EngineFacts]": ...

    async def open_session(self, tenant: str, facts: "Mapping[str, Any]") -> str:
        """Return the new session's id."""
        ...

    async def heartbeat(self, tenant: str, session_id: str) -> None: ...

    async def finish_session(self, tenant: str, session_id: str) -> None: ...

    async def submit(self, order: "ClientOrder") -> "Accepted":
        """Take an order; it is on disk once this returns."""
        ...

    async def wait(
        self, tenant: str, request_id: str, timeout_s: float
    ) -> "Result | Failure | Pending":
        """Return the outcome of an order, or its state after so many seconds."""
        ...

    async def pass_over(self, tenant: str, model_id: str, seq_id: int) -> None:
        """Have later orders of a model not wait for this one, which was refused."""
        ...

    async def cancel(self, tenant: str, request_id: str) -> None: ...

    async def open_sampling_session(
        self,
        tenant: str,
        session_id: str,
        seq_id: int,
        *,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        """Return the sampler's id."""
        ...

    async def describe_sampler(self, tenant: str, sampler_id: str) -> "SamplerRecord": ...

    async def describe_model(self, tenant: str, model_id: str) -> "ModelRecord": ...

    async def list_models(self, tenant: str) -> "Sequence[ModelRecord]": ...

    async def list_checkpoints(
        self, tenant: str, model_id: str | None
    ) -> "Sequence[CheckpointRecord]":
        """Return the checkpoints of a model, or all of the tenant's."""
        ...

    async def describe_checkpoint(self, tenant: str, path: str) -> "CheckpointRecord": ...

    async def delete_checkpoint(self, tenant: str, path: str) -> None: ...

    async def set_ttl(self, tenant: str, path: str, seconds: float | None) -> None: ...

    async def archive(self, tenant: str, path: str) -> "Path":
        """Return a tar file of a checkpoint's folder."""
        ...

    async def wait_until_broken(self) -> None:
        """Wait until nothing can be acknowledged any more, and raise why."""
        ...


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
