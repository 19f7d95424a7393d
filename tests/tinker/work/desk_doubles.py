"""Peers of a desk that compute next to nothing, but what they compute depends on all that came
before; and a wire whose bodies are JSON."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_tinker.ports import OrderRefused, OutOfOrder, Unavailable, Unknown
from flotilla_tinker.types import (
    AdamSettings,
    BaseFacts,
    ClientOrder,
    EngineFacts,
    Kind,
    LoadOrder,
    LossBatch,
    LossResult,
    LossSequence,
    ModelSettings,
    Result,
    SampledAnswer,
    SampleOrder,
    SampleResult,
    SamplerWeights,
    SaveOrder,
)

BASE = "tiny"
# A batch or prompt that begins with this token kills who computes it.
DEADLY = -666
# One that is refused.
REFUSED = -13


class JsonWire:
    """Bodies and results as JSON."""

    def read_forward_backward(self, body: bytes) -> LossBatch:
        read = json.loads(body)
        ids = np.array(read["tokens"], np.int32)
        return LossBatch(
            loss="cross_entropy",
            options={},
            sequences=[LossSequence(ids, ids.astype(np.int64), {})],
            forward_only=read.get("forward_only", False),
        )

    def write_loss_result(self, result: LossResult, batch: LossBatch) -> bytes:
        del batch
        return json.dumps([each.tolist() for each in result.logprobs]).encode()

    def read_create_model(self, body: bytes) -> ModelSettings:
        return ModelSettings(**json.loads(body))

    def read_optim_step(self, body: bytes) -> AdamSettings:
        return AdamSettings(**json.loads(body))

    def read_save(self, body: bytes) -> SaveOrder:
        return SaveOrder(**json.loads(body))

    def read_load(self, body: bytes) -> LoadOrder:
        return LoadOrder(**json.loads(body))

    def read_sample(self, body: bytes) -> tuple[str, SampleOrder]:
        read = json.loads(body)
        prompt = np.array(read["prompt"], np.int32)
        return read["target"], SampleOrder(prompt, read.get("num_samples", 1))

    def write_sample_result(self, result: SampleResult, order: SampleOrder) -> Result:
        del order
        answers = [{"tokens": a.token_ids.tolist(), "spans": list(a.spans)} for a in result.answers]
        return Result(json.dumps(answers).encode(), "application/x-protobuf")

    def write_json(self, kind: Kind, **fields: Any) -> Result:
        given = {key: value for key, value in fields.items() if value is not None}
        return Result(json.dumps({"type": kind.value, **given}).encode(), "application/json")


@dataclass(slots=True)
class _Model:
    """Digests in the place of weights, optimizer and accumulated gradient."""

    settings: ModelSettings
    weights: str
    optimizer: str = ""
    gradient: str = ""
    newest: int = 0
    last_answer: Any = None


@dataclass(slots=True)
class ScriptedTrainer:
    """A TrainingPeer that keeps to the contract. With `memory` its models outlive the process."""

    memory: Path | None = None
    max_rank: int = 64
    max_models: int = 8
    pause_s: float = 0.0
    away: bool = False
    # So many answers to operations get lost on the way.
    losing_answers: int = 0
    models: dict[str, _Model] = field(default_factory=dict[str, _Model])
    # Calls for these models wait.
    gates: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    # (model, call), in the order in which they ran.
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        if self.memory and self.memory.exists():
            for model_id, row in json.loads(self.memory.read_text()).items():
                settings = ModelSettings(**row.pop("settings"))
                self.models[model_id] = _Model(settings, **row)

    def lose_all(self) -> None:
        self.models.clear()
        self._remember()

    async def describe_base(self) -> BaseFacts:
        await self._answer()
        newest = {model_id: model.newest for model_id, model in self.models.items()}
        limits = (self.max_rank, self.max_models)
        return BaseFacts(BASE, 4096, 1000, *limits, ["cross_entropy"], newest)

    async def create_model(self, model_id: str, settings: ModelSettings) -> int:
        await self._answer(model_id, "create")
        weights = _digest(sorted(asdict(settings).items()))
        model = self.models.setdefault(model_id, _Model(settings, weights))
        self._remember()
        return model.newest

    async def delete_model(self, model_id: str) -> None:
        await self._answer(model_id, "delete")
        self.models.pop(model_id, None)
        self._remember()

    async def forward_backward(self, model_id: str, number: int, batch: LossBatch) -> LossResult:
        await self._answer(model_id, "forward" if batch.forward_only else f"backward {number}")
        model, tokens = self._model(model_id), batch.sequences[0].token_ids.tolist()
        self._check_tokens(tokens)
        answer = _numbers(model.weights, tokens)
        if not batch.forward_only and self._counts(model, number, answer):
            model.gradient = _digest(model.gradient, model.weights, tokens)
            self._remember()
        elif not batch.forward_only:
            answer = model.last_answer
        if self.losing_answers:
            self.losing_answers -= 1
            raise Unavailable("lost on the way")
        return LossResult([np.array(answer, np.float32)], {"loss:sum": 1.0})

    async def apply_update(
        self, model_id: str, number: int, settings: AdamSettings
    ) -> Mapping[str, float]:
        await self._answer(model_id, f"update {number}")
        model = self._model(model_id)
        if self._counts(model, number, _numbers(model.weights, model.gradient)):
            model.optimizer = _digest(model.optimizer, model.gradient)
            model.weights = _digest(model.weights, model.optimizer, settings.learning_rate)
            model.gradient = ""
            self._remember()
        return {"grad_norm": model.last_answer[0]}

    async def save_state(self, model_id: str, number: int, folder: str) -> int:
        return await self._save(model_id, number, folder, "save")

    async def export_weights(self, model_id: str, number: int, folder: str) -> int:
        return await self._save(model_id, number, folder, "export")

    async def load_state(
        self, model_id: str, number: int, folder: str, *, with_optimizer: bool
    ) -> None:
        await self._answer(model_id, f"load {number}")
        model = self._model(model_id)
        if self._counts(model, number, None):
            state = json.loads(_read_state(folder))
            model.weights, model.gradient = state["weights"], ""
            if with_optimizer:
                model.optimizer = state["optimizer"]
            self._remember()

    async def _save(self, model_id: str, number: int, folder: str, call: str) -> int:
        await self._answer(model_id, call)
        model = self._model(model_id)
        if number != model.newest:
            raise OutOfOrder(f"{number} is not {model.newest}")
        state = json.dumps({"weights": model.weights, "optimizer": model.optimizer})
        _write_state(folder, state)
        return len(state)

    def _counts(self, model: _Model, number: int, answer: Any) -> bool:
        """Count an operation; return False if it is the newest one again."""
        if number == model.newest:
            return False
        if number != model.newest + 1:
            raise OutOfOrder(f"{number} is not {model.newest + 1}")
        model.newest, model.last_answer = number, answer
        return True

    def _check_tokens(self, tokens: list[int]) -> None:
        if tokens[0] == REFUSED:
            raise OrderRefused("token -13 is out of luck")
        if tokens[0] == DEADLY:
            self.lose_all()
            raise Unavailable("died")

    def _model(self, model_id: str) -> _Model:
        if model_id not in self.models:
            raise Unknown(model_id)
        return self.models[model_id]

    async def _answer(self, model_id: str = "", call: str = "") -> None:
        await asyncio.sleep(self.pause_s)
        if model_id in self.gates:
            await self.gates[model_id].wait()
        if self.away:
            raise Unavailable("away")
        if call:
            self.calls.append((model_id, call))

    def _remember(self) -> None:
        if self.memory:
            draft = self.memory.with_suffix(".new")
            draft.write_text(json.dumps({key: asdict(row) for key, row in self.models.items()}))
            draft.replace(self.memory)


@dataclass(slots=True)
class ScriptedEngine:
    """A SamplingPeer that keeps to the contract; an answer repeats the weights that gave it."""

    max_num_seqs: int = 64
    max_samplers: int = 4
    max_rank: int = 32
    pause_s: float = 0.0
    latency_s: float = 0.0
    away: bool = False
    samplers: dict[str, SamplerWeights] = field(default_factory=dict[str, SamplerWeights])
    # Samplers, in the order of their requests; and how many requests ran concurrently at most.
    sampled: list[tuple[str, list[int]]] = field(default_factory=list[tuple[str, list[int]]])
    running: int = 0
    most_running: int = 0
    deaths: int = 0
    # It describes itself, but does nothing else.
    half_up: bool = False
    described: int = 0
    # Requests wait for it if there is one.
    gate: asyncio.Event | None = None

    def lose_all(self) -> None:
        self.samplers.clear()

    async def describe_engine(self) -> EngineFacts:
        self._answer()
        self.described += 1
        limits = (self.max_rank, self.max_num_seqs, sorted(self.samplers), self.max_samplers)
        return EngineFacts(BASE, 4096, 1000, *limits)

    async def open_sampler(self, sampler_id: str, weights: SamplerWeights) -> None:
        self._answer()
        if self.half_up:
            raise Unavailable("half up")
        if self.samplers.setdefault(sampler_id, weights) != weights:
            raise OrderRefused(f"{sampler_id} has other weights")
        await asyncio.sleep(self.latency_s)
        if len(self.samplers) > self.max_samplers:
            raise OrderRefused("too many samplers")

    async def replace_weights(self, sampler_id: str, weights: SamplerWeights) -> None:
        self._answer()
        if sampler_id not in self.samplers:
            raise Unknown(sampler_id)
        self.samplers[sampler_id] = weights

    async def close_sampler(self, sampler_id: str) -> None:
        self._answer()
        self.samplers.pop(sampler_id, None)

    async def sample(self, sampler_id: str, order: SampleOrder) -> SampleResult:
        self._answer()
        await asyncio.sleep(self.latency_s)
        prompt = order.prompt_ids.tolist()
        if sampler_id not in self.samplers:
            raise Unknown(sampler_id)
        self.sampled.append((sampler_id, prompt))
        self.running += order.num_samples
        self.most_running = max(self.most_running, self.running)
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(self.pause_s))
        finally:
            self.running -= order.num_samples
        self._answer()
        if prompt[0] == REFUSED:
            raise OrderRefused("token -13 is out of luck")
        if prompt[0] == DEADLY:
            self.lose_all()
            self.deaths += 1
            raise Unavailable("died")
        weights = self.samplers.get(sampler_id)
        if weights is None:
            raise Unavailable("lost with its sampler")
        seen = _read_state(weights.folder) if weights.folder else ""
        ids = np.array(_numbers(seen, prompt)[:3], np.int32)
        answer = SampledAnswer(
            ids, ids.astype(np.float32), stopped=True, spans=[(weights.label, 3)]
        )
        return SampleResult([answer] * order.num_samples)

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("away")


def _read_state(folder: str) -> str:
    return Path(folder, "state.json").read_text()


def _write_state(folder: str, state: str) -> None:
    Path(folder).mkdir()
    Path(folder, "state.json").write_text(state)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _numbers(*parts: object) -> list[float]:
    return [float(each) for each in hashlib.sha256(repr(parts).encode()).digest()[:4]]


def an_order(
    kind: Kind, session_id: str, place: str | None, seq_id: int, tenant: str = "ann", /, **body: Any
) -> ClientOrder:
    """An order whose body is these fields."""
    return ClientOrder(kind, tenant, session_id, place, seq_id, json.dumps(body).encode())


def create_order(
    session_id: str, number: int = 0, tenant: str = "ann", **settings: Any
) -> ClientOrder:
    given = {"base_model": BASE, "lora_rank": 8, **settings}
    model_id = f"{session_id}:train:{number}"
    return an_order(Kind.CREATE_MODEL, session_id, model_id, 0, tenant, **given)


def sample_order(
    target: str,
    seq_id: int,
    prompt: list[int],
    session_id: str = "",
    tenant: str = "ann",
    samples: int = 1,
) -> ClientOrder:
    body: dict[str, Any] = {"target": target, "prompt": prompt, "num_samples": samples}
    return an_order(Kind.SAMPLE, session_id, None, seq_id, tenant, **body)


def with_body(order: ClientOrder, body: bytes) -> ClientOrder:
    return replace(order, body=body)
