"""A rank that trains models at callers' requests: any number with adapters on one frozen base, or
one with all weights. Commands: see `ServingRank.commands`."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.text.printable_text import first_line
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.adapter_files import BaseRecord
from flotilla_learner.rank.checkpoint_writer import CheckpointWriter
from flotilla_learner.rank.checkpointing_choice import fit_checkpointing
from flotilla_learner.rank.data_parallel import RankPlacement, Replicas
from flotilla_learner.rank.lora import add_separate_adapter, linear_layers, remove_adapter
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.rank_setup import select_device
from flotilla_learner.rank.served_model import RequestRefused, ServedModel
from flotilla_learner.rank.target_passes import TargetPasses
from flotilla_learner.ranks import protocol, training_protocol
from flotilla_learner.training_types import AdamUpdate, AdapterChoice, BaseModel
from flotilla_learner.types import CheckpointFiles

# As in Tinker, whatever the rank.
ALPHA = 32.0
# Float32 weight, gradient and two moments.
_TRAINED_BYTES = 16
_CHOICE, _UPDATE = TypeAdapter(AdapterChoice), TypeAdapter(AdamUpdate)


class ServingSetup(ConfigModel):
    """Message that such a rank receives at its start."""

    # Prefix of the file names in `shm_dir`.
    name: str
    shm_dir: Path
    policy: PolicyConfig
    rank: RankConfig
    # The base of adapters; otherwise the weights are trained.
    frozen: bool
    # Most adapters, and the largest rank.
    max_models: int
    max_rank: int
    place: RankPlacement


@dataclass(frozen=True, slots=True)
class ServedBase:
    """What a rank has loaded before there is any model."""

    policy: Policy
    replicas: Replicas
    # Of adapters; None if the weights themselves are trained.
    record: BaseRecord | None
    # Names of the layers that may have adapters.
    layers: tuple[str, ...]


def load_served(setup: ServingSetup) -> ServedBase:
    """Load the base, and join the other ranks. Raises ModelError."""
    torch.set_num_threads(setup.rank.threads)
    device = select_device(setup.rank, setup.place)
    replicas = Replicas()
    if setup.place.count > 1:
        replicas = Replicas.join_process_group(setup.place, device)
    policy = load_policy(setup.policy, setup.rank, frozen=setup.frozen)
    layers = tuple(linear_layers(policy.model))
    record = BaseRecord.of_policy(policy, setup.policy) if setup.frozen else None
    if setup.rank.gradient_checkpointing == "auto" and device.type == "cuda":
        later = _adapter_bytes(setup, policy, layers) if setup.frozen else 0
        reserved = later + _taken_by_others(device)
        bodies = [policy.model.base_model]
        fit_checkpointing(policy, setup.rank, replicas, bodies, reserved)
    return ServedBase(policy, replicas, record, layers)


def _adapter_bytes(setup: ServingSetup, policy: Policy, layers: tuple[str, ...]) -> int:
    """Return the most that all models' adapters, gradients and moments take."""
    weights: list[Tensor] = [policy.model.get_parameter(f"{name}.weight") for name in layers]
    width = sum(sum(weight.shape) for weight in weights)
    return _TRAINED_BYTES * setup.max_models * setup.max_rank * width


class ServingRank:
    """Models by the service's names. Commands come one at a time."""

    def __init__(self, setup: ServingSetup, base: ServedBase) -> None:
        self._setup = setup
        self._base = base
        packer = RowPacker(base.policy, setup.rank.pack_tokens, base.replicas)
        self._passes = TargetPasses(packer, setup.rank.head_chunk)
        self.models: dict[str, ServedModel] = {}
        # Numbers of adapters' names, and of answers in shared memory.
        self._added = self._answered = 0

    @property
    def commands(self) -> Mapping[str, Callable[[protocol.Message], protocol.Message]]:
        """Commands by name. A refused one answers {"refused": REASON, "message": ...}."""
        named = {
            "create": self.create_model,
            "delete": self.delete_model,
            "accumulate": self.accumulate,
            "update": self.update_model,
            "save": self.save_model,
            "load": self.load_model,
        }
        return {name: _answering_refusals(command) for name, command in named.items()}

    def describe_start(self) -> protocol.Message:
        """Return a `BaseModel`."""
        policy = self._base.policy
        count = sum(parameter.numel() for parameter in policy.named_parameters().values())
        return asdict(BaseModel(count, policy.vocabulary))

    def create_model(self, message: protocol.Message) -> protocol.Message:
        """Create a model with the settings of an `AdapterChoice`; return its parameters' number."""
        choice = _CHOICE.validate_python(message["choice"])
        policy = self._base.policy
        if choice.rank > 0:
            layers = self._chosen_layers(choice)
            config = LoraConfig(rank=choice.rank, alpha=ALPHA)
            # PEFT's names have no dots.
            self._added += 1
            name = f"model{self._added}"
            added = add_separate_adapter(policy.model, config, layers, name, choice.seed)
            policy = replace(policy, adapters=added)
        model = ServedModel.start(policy, self._base.record)
        self.models[message["model"]] = model
        return {"parameters": sum(parameter.numel() for parameter in model.parameters)}

    def _chosen_layers(self, choice: AdapterChoice) -> list[str]:
        wanted = {"attention": choice.attention, "mlp": choice.mlp}
        chosen = [name for name in self._base.layers if wanted[_part_of(name)]]
        if not chosen:
            raise RequestRefused("BAD_SETTINGS", "the base has no linear layers of these parts")
        return chosen

    def delete_model(self, message: protocol.Message) -> protocol.Message:
        """Forget a model and free its memory."""
        model = self.models.pop(message["model"])
        if model.policy.adapters is not None:
            remove_adapter(model.policy.model, model.policy.adapters)
        del model
        gc.collect()
        if self._base.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def accumulate(self, message: protocol.Message) -> protocol.Message:
        """Run a pass over a batch in shared memory; the first rank writes its scores there."""
        batch = training_protocol.read_targets(message)
        model = self.models[message["model"]]
        try:
            scores = model.accumulate(self._passes, batch, self._base.replicas)
        except torch.OutOfMemoryError as error:
            # Other ranks would wait for this one.
            if self._base.replicas.count > 1:
                raise
            torch.cuda.empty_cache()
            raise RequestRefused("BAD_BATCH", _describe_shortage(error)) from error
        if self._setup.place.index > 0:
            return {}
        self._answered += 1
        setup = self._setup
        path = protocol.token_path(setup.shm_dir, setup.name, self._answered)
        return training_protocol.write_scores(path, scores)

    def update_model(self, message: protocol.Message) -> protocol.Message:
        """Apply an `AdamUpdate`."""
        settings = _UPDATE.validate_python(message["settings"])
        return {"grad_norm": self.models[message["model"]].update(settings)}

    def save_model(self, message: protocol.Message) -> protocol.Message:
        """Write a model's weights, and its optimizer if wanted, as a checkpoint."""
        saved = self.models[message["model"]].saved
        groups = saved.groups if message["with_optimizer"] else saved.weights
        writer = CheckpointWriter(0, self._base.policy.device, saved.describe, saved.record)
        writer.begin_writing(Path(message["folder"]), groups, message["step"])
        try:
            files: CheckpointFiles = writer.when_written(lambda written: written).result()
        except (OSError, SafetensorError) as error:
            raise RequestRefused("FOLDER_UNUSABLE", f"{error}") from error
        return protocol.CHECKPOINT.dump_python(files, mode="json")

    def load_model(self, message: protocol.Message) -> protocol.Message:
        """Replace a model's weights, and its optimizer if wanted, by saved ones."""
        model = self.models[message["model"]]
        model.load(Path(message["folder"]), with_optimizer=message["with_optimizer"])
        return {}

    def close(self) -> None:
        """Nothing is held in shared memory."""


def _answering_refusals(
    command: Callable[[protocol.Message], protocol.Message],
) -> Callable[[protocol.Message], protocol.Message]:
    def answer(message: protocol.Message) -> protocol.Message:
        try:
            return command(message)
        except RequestRefused as refused:
            return {"refused": refused.reason, "message": str(refused)}

    return answer


def _describe_shortage(error: Exception) -> str:
    return (
        "the GPU's memory is too small for this batch: lower learner.rank.pack_tokens or"
        f" policy.max_model_len, or delete models ({first_line(str(error), 300)})"
    )


def _taken_by_others(device: torch.device) -> int:
    """Return the bytes of the GPU that other processes have, such as engines."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _part_of(layer: str) -> str:
    """Return the part of a decoder block to which a linear layer belongs, by its name."""
    return "attention" if "attn" in layer or "attention" in layer else "mlp"
