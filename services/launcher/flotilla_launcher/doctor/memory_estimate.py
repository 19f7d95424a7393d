"""Estimate of a run's memory and disk needs, from the model's size and the spec. Pure.

A rank keeps parameters in float32 whatever the compute dtype: 4 bytes per parameter, as many for
its gradient, 8 for AdamW's moments. Under adapters it keeps the model as engines do, and these
alone have gradients and moments. Activations are only estimated: the learner's burn-in measures
them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flotilla_common.models.activation_memory import DecoderShape, layer_activation_bytes
from flotilla_common.spec.spec import PolicyConfig
from flotilla_launcher.doctor.model_size import ModelSize

GIB = 2**30
_FLOAT32, _GRADIENT, _MOMENTS = 4, 4, 8
# Versions of the weights in shared memory, as the learner publishes them.
_SLOTS = 3
_CPU_KV_BYTES = 256 * 2**20
# Pixels of pictures that a rank keeps for its next packs.
_KEPT_PIXELS = GIB
# Tokens of pictures that vLLM encodes and caches at once, unless a step or a picture has more.
_ENCODED_TOKENS = 8192
# A Python process with torch, or with vLLM's engine, before it has loaded anything.
_PROCESS_BYTES = GIB


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Memory of the learner on one machine, in bytes: first of each rank, in GPU memory or on a CPU
    in the machine's own."""

    parameters: int
    gradients: int
    moments: int
    reference: int
    # Of the longest pack, with the logits of one chunk of the head.
    activations: int
    # In the machine's own memory.
    offloaded: int
    # On each GPU; 0 on a CPU.
    device: int
    # All ranks in the machine's own memory, and the part of it that is activations.
    host: int
    host_estimate: int
    # A checkpoint, copied to be written beside training.
    copied: int
    # GPUs of one machine; 0 on a CPU.
    gpus: int
    # Settings that would take less.
    savings: Sequence[str]
    gpus_key: str = "learner.rank.processes"


def estimate_trainer(
    model: ModelSize, policy: PolicyConfig, learner: Mapping[str, Any]
) -> TrainerMemory:
    """Estimate the learner under `[learner]`, for sequences of up to `policy.max_model_len`."""
    rank, algorithm, lora = learner["rank"], learner["algorithm"], learner["lora"]
    width, uses_gpu, ranks = item_bytes(policy.dtype), rank["device"] == "cuda", rank["processes"]
    split, offloads = ranks if rank["shard"] else 1, rank["offload_optimizer"]
    # With a critic.
    models = 2 if algorithm["advantage"] == "gae" else 1
    seeing = estimate_pictures(model, policy, rank)
    tower = model.vision.parameters if model.vision and policy.vision else 0
    moving = model.parameters - seeing.frozen
    trained = models * (moving if lora is None else adapter_parameters(model, lora))
    own = trained // split
    # Embedding and head are whole during a pass, and two blocks: one is computed, one is fetched.
    # So is what reads pictures.
    ends = 2 * model.vocab * model.hidden
    blocks = max(model.parameters - tower - ends, 0) // model.layers
    whole = ends + tower + 2 * blocks if split > 1 else 0
    # Frozen parts stay in float32.
    base, reference, merging = seeing.frozen * _FLOAT32 // split, 0, 0
    if lora is not None:
        # The base is the reference as well. Its embeddings stay in float32.
        embedding = model.vocab * model.hidden * (_FLOAT32 - width)
        base = (model.parameters * width + embedding) // split
        # For a moment: base, change and sum of the largest layer, in float32.
        merging = 3 * _FLOAT32 * max(rows * columns for rows, columns in _layers(model).values())
    else:
        whole *= models
        if algorithm["kl"]["coefficient"] > 0 and algorithm["kl"]["to"] == "reference":
            reference = model.parameters // split * _FLOAT32
    tokens = max(rank["pack_tokens"], policy.max_model_len)
    inputs = tokens * width * model.layers * model.hidden
    inputs *= uses_gpu and rank["offload_activations"]
    # On a GPU `auto` takes what fits, and `full` at the least.
    kept = rank["gradient_checkpointing"]
    kept = ("full" if uses_gpu else "off") if kept == "auto" else kept
    shape = DecoderShape(model.layers, model.hidden, model.intermediate)
    # Logits, their softmax and its gradient.
    head = 3 * _FLOAT32 * rank["head_chunk"] * model.vocab
    activations = layer_activation_bytes(shape, tokens, width, kept) - inputs + head + merging
    activations += seeing.device
    offloaded = inputs
    if rank["offload_reference"]:
        offloaded, reference = offloaded + reference, 0
    held, moments = own, 0 if offloads else own * _MOMENTS
    if offloads:
        # AdamW's own copies of parameters and gradients come on top of its moments: 15.6 bytes a
        # parameter were measured on a 4B model. Of what is split nothing else exists.
        offloaded += own * (_MOMENTS + _FLOAT32 + _GRADIENT)
        if split > 1:
            offloaded, base, held = offloaded + base, 0, 0
    parameters = held * _FLOAT32 + base + whole * width
    # The whole ones are summed in float32, but those that are frozen.
    summed = max(whole - seeing.frozen, 0) if lora is None else 0
    gradients = (held + summed) * _GRADIENT
    device = parameters + gradients + moments + reference + activations
    copied = trained * (_FLOAT32 + _MOMENTS)
    settings = {
        "shard = true": split == 1 and ranks > 1,
        'gradient_checkpointing = "full"': rank["gradient_checkpointing"] not in ("auto", "full"),
        "offload_optimizer = true": not offloads,
        "offload_activations = true": uses_gpu and not rank["offload_activations"],
    }
    return TrainerMemory(
        *(parameters, gradients, moments, reference, activations, offloaded),
        device=device if uses_gpu else 0,
        host=ranks * (offloaded + seeing.host + _PROCESS_BYTES + (0 if uses_gpu else device))
        + copied,
        host_estimate=0 if uses_gpu else ranks * activations,
        copied=copied,
        gpus=ranks if uses_gpu else 0,
        savings=[f"learner.rank.{setting}" for setting, saves in settings.items() if saves],
    )


class PictureMemory(NamedTuple):
    """What pictures take of a rank: parameters that are frozen, and bytes on its device and in the
    machine's memory."""

    frozen: int = 0
    device: int = 0
    host: int = 0


def estimate_pictures(
    model: ModelSize, policy: PolicyConfig, rank: Mapping[str, Any]
) -> PictureMemory:
    """Estimate the pictures of the longest pack, as if it showed as many as fit into it."""
    size, vision = model.vision, policy.vision
    if size is None or vision is None:
        return PictureMemory()
    width, tokens = item_bytes(policy.dtype), max(rank["pack_tokens"], policy.max_model_len)
    conversations = -(-tokens // policy.max_model_len)
    shown = min(tokens, conversations * size.shown_tokens(vision, policy.max_model_len))
    patches = shown * size.patches_per_token
    pixels = patches * size.patch_values * _FLOAT32
    # Of what is frozen nothing is kept for a backward pass: one layer is there at a time.
    kept = rank["gradient_checkpointing"] if vision.tower == "trained" else "full"
    layers = size.shape.layers if vision.tower == "trained" else 0
    shape = DecoderShape(layers, size.shape.hidden, size.shape.intermediate)
    passing = layer_activation_bytes(shape, patches, width, "full" if kept == "auto" else kept)
    device = pixels + passing + shown * size.features * width
    return PictureMemory(size.frozen_parameters(vision), device, _KEPT_PIXELS + pixels)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one rollout replica on each of its machines, in bytes: weights on each device, and
    what is left for the KV cache. On a CPU each worker counts as a device."""

    weights: int
    # Keys and values of one sequence of full length, on each device.
    sequence: int
    max_num_seqs: int
    # None: what `share` of the device leaves.
    cache: int | None
    share: float
    # The machine's own memory.
    host: int
    # GPUs of one machine, 0 on a CPU; and the keys that set their number.
    gpus: int
    gpus_key: str
    # Features of pictures that are kept, and the encoding of as many at once, on each device.
    pictures: int = 0

    def kv_cache_bytes(self, device_bytes: int) -> int:
        """Return the bytes left for the KV cache; negative if the weights alone are too large."""
        taken = self.weights + self.pictures
        if self.cache is not None:
            return min(self.cache, device_bytes - taken)
        return int(self.share * device_bytes) - taken


def estimate_engine(
    model: ModelSize, policy: PolicyConfig, rollout: Mapping[str, Any]
) -> EngineMemory:
    """Estimate a replica under `[rollout]`."""
    options, width = rollout["engine"], item_bytes(policy.dtype)
    uses_gpu, parallel = options["device"] == "cuda", options["tensor_parallel"]
    engines, nodes = options["data_parallel"], options["nodes"]
    workers = parallel * int(options["options"].get("pipeline_parallel_size", 1)) // nodes
    tokens = rollout["max_input_length"] + rollout["max_generate_length"]
    if rollout.get("limits", {}).get("on_cut") == "continue":
        tokens = policy.max_model_len
    sequence = model.kv_bytes(width) * min(tokens, policy.max_model_len)
    weights, cache = model.parameters * width // parallel, options["kv_cache_memory_bytes"]
    if cache is None and not uses_gpu:
        cache = _CPU_KV_BYTES
    pictures = encoder_bytes(model, policy, options["max_num_batched_tokens"])
    held = weights if uses_gpu else engines * workers * (weights + pictures + (cache or 0))
    several = " * data_parallel" if engines > 1 else " / nodes" if nodes > 1 else ""
    return EngineMemory(
        weights=weights,
        sequence=sequence // min(parallel, model.kv_heads),
        max_num_seqs=options["max_num_seqs"],
        cache=cache,
        share=options["gpu_memory_utilization"],
        host=held + engines * _PROCESS_BYTES,
        gpus=engines * workers if uses_gpu else 0,
        gpus_key=f"rollout.engine.tensor_parallel{several}",
        pictures=pictures,
    )


def encoder_bytes(model: ModelSize, policy: PolicyConfig, batched: int | None) -> int:
    """Return the bytes of an engine's encoder cache, and of encoding pictures that fill it."""
    size = model.vision
    if size is None:
        return 0
    width, tokens = item_bytes(policy.dtype), max(batched or _ENCODED_TOKENS, size.largest)
    shape = DecoderShape(0, size.shape.hidden, size.shape.intermediate)
    patches = tokens * size.patches_per_token
    pixels = patches * size.patch_values * width
    return (
        tokens * size.features * width
        + pixels
        + layer_activation_bytes(shape, patches, width, "full")
    )


def weight_slot_bytes(model: ModelSize, policy: PolicyConfig, learner: Mapping[str, Any]) -> int:
    """Return the bytes of the weights' slots in /dev/shm, from which every engine of the
    machine loads; of adapters where these are published alone."""
    lora = learner["lora"] if policy.adapter_rank is not None else None
    published = model.parameters if lora is None else adapter_parameters(model, lora)
    return _SLOTS * published * item_bytes(policy.dtype)


def adapter_parameters(model: ModelSize, lora: Mapping[str, Any]) -> int:
    """Return the parameters of the adapters under `[learner.lora]`.

    More than there are for a mixture, whose experts get none. A layer of a name that is not common
    counts as the largest that is."""
    sizes = {name: sum(shape) for name, shape in _layers(model).items()}
    wanted = lora["target_modules"]
    # As PEFT and the learner name it: each linear layer but the head.
    targets = sizes if wanted == "all-linear" else [wanted] if isinstance(wanted, str) else wanted
    ends = (target.rpartition(".")[2] for target in targets)
    return lora["rank"] * model.layers * sum(sizes.get(end, max(sizes.values())) for end in ends)


def _layers(model: ModelSize) -> Mapping[str, tuple[int, int]]:
    """Return the shapes of a block's linear layers by the names that most models give them."""
    hidden, wide = model.hidden, model.intermediate
    queries = (model.heads * model.head_dim) or hidden
    keys = model.kv_heads * model.head_dim
    attention = {"q_proj": (queries, hidden), "o_proj": (hidden, queries)}
    attention |= dict.fromkeys(("k_proj", "v_proj"), (keys, hidden))
    return attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (wide, hidden))


def item_bytes(dtype: str) -> int:
    return _FLOAT32 if dtype == "float32" else 2


class MemoryNeeds(NamedTuple):
    """A run's needs, in bytes but for the model's `parameters`."""

    parameters: int
    trainer: TrainerMemory
    # None: the run plays no episode.
    engine: EngineMemory | None
    # In /dev/shm.
    shared: int


def describe_needs(needs: MemoryNeeds) -> str:
    """Describe the needs in one line."""
    trainer, engine = needs.trainer, needs.engine
    if trainer.device:
        kinds = ("parameters", "gradients", "moments", "reference")
        sizes = {kind: getattr(trainer, kind) for kind in kinds}
        parts = [f"{kind} {format_gib(size)}" for kind, size in sizes.items() if size]
        parts.append(f"{format_gib(trainer.activations)} of estimated activations")
        if trainer.offloaded:
            parts.append(f"{format_gib(trainer.offloaded)} more on the host")
        learner = f"{format_gib(trainer.device)} a GPU ({', '.join(parts)})"
    else:
        estimated = f"{format_gib(trainer.host_estimate)} of it estimated activations"
        learner = f"{format_gib(trainer.host)} of memory ({estimated})"
    described = f"{needs.parameters / 1e9:.2f} B parameters; learner {learner}"
    if engine is None:
        return described
    pictures = f", {format_gib(engine.pictures)} for pictures" if engine.pictures else ""
    return (
        f"{described}, rollout"
        f" {format_gib(engine.weights)} of weights{pictures} and {format_gib(engine.sequence)} of"
        f" KV a sequence at up to {engine.max_num_seqs} sequences"
    )


def format_gib(size: float) -> str:
    """Format a size: `12.3 GiB`, or MiB below one tenth of a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
