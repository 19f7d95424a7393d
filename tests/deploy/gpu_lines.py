"""Lines of the services that a machine without GPUs cannot execute, or only with a substitute."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.repository import ROOT

# Torch's module, and the functions that share memory of GPUs.
_NAMES = ("cuda", "_share_cuda_", "_new_shared_cuda")
_WORD = re.compile(r"\b(cuda|nccl)\b|nvidia-smi", re.IGNORECASE)
# By file and line: its purpose on a GPU, and its substitute on a machine without one.
GPU_LINES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "services/common/flotilla_common/tensors/transfer_group.py": {
        'group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))': (
            "weights are sent into engines over NCCL",
            "gloo, by the same calls (`tests/rollout/adapters/test_vllm_transfer.py`)",
        ),
    },
    "services/common/flotilla_common/tensors/shared_buffers.py": {
        'return f"GPU-{torch.cuda.get_device_properties(device).uuid}"': (
            "learner and engine detect that they share a GPU, for weights over ipc",
            "host memory stands in for it (`tests/rollout/adapters/test_vllm_transfer.py`)",
        ),
        'there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]': (
            "the sender offers buffers on its GPUs",
            "in host memory, to another process, by the same calls"
            " (`tests/learner/weights/test_weight_sender.py`)",
        ),
        'return _make_on_gpu(size, device) if device.type == "cuda" else _make_in_memory(size)': (
            "the same",
            "the same tests",
        ),
        "shared: Any = data.untyped_storage()._share_cuda_()"
        "  # pyright: ignore[reportPrivateUsage]": (
            "buffers are shared over CUDA IPC",
            "as files in memory (the same tests)",
        ),
        'kind: Literal["cuda"] = "cuda"': (
            "their handles are checked",
            "handles that a CPU cannot open (`tests/learner/weights/test_shared_buffers.py`)",
        ),
        'kind = "cuda" if isinstance(handle, CudaHandle) else "cpu"': (
            "the same",
            "the same tests",
        ),
        "new_shared: Any = torch.UntypedStorage._new_shared_cuda"
        "  # pyright: ignore[reportPrivateUsage]": ("they are opened", "the same tests"),
        'if device.type == "cuda":': (
            "device, stream and copies to buffers are those of the GPU",
            "those of the host (the same tests); `tests/gpu` runs all of it",
        ),
        "torch.cuda.current_stream(device).synchronize()": ("the same", "the same tests"),
    },
    "services/learner/flotilla_learner/weights/adapters/weight_sender.py": {
        'device = torch.device("cuda") if self.opening.backend == "nccl" else data.device': (
            "they are copied to the sender's GPU piece by piece",
            "they are sent from shared memory (the same tests)",
        ),
    },
    "services/learner/flotilla_learner/rank/data_parallel.py": {
        '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",': (
            "ranks sum over NCCL, and offloaded parts over gloo",
            "gloo alone, 1 to 4 ranks (`tests/learner/ranks`)",
        ),
    },
    "services/learner/flotilla_learner/rank/device_transfer.py": {
        'if device.type != "cuda":': (
            "a pack's numbers are copied from pinned memory while the host continues",
            "that no number is read between packs (`tests/learner/rank/test_device_transfer.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/host_parameters.py": {
        'if device.type == "cuda":': (
            "all gradients are copied to pinned host memory, with one wait",
            "memory that is not pinned (`tests/learner/rank/test_host_parameters.py`)",
        ),
        "torch.cuda.current_stream(device).synchronize()": ("the same", "the same tests"),
    },
    "services/learner/flotilla_learner/rank/sharding.py": {
        'offload_policy=CPUOffloadPolicy(pin_memory=self.device.type == "cuda")': (
            "offloaded parts are in pinned memory",
            "memory that is not pinned (`tests/learner/ranks/test_sharded_ranks.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/rank_setup.py": {
        "there = torch.cuda.device_count()": ("GPUs are counted", "`tests/gpu`"),
        "torch.cuda.set_device(place.slot)": ("a rank takes its GPU", "`tests/gpu`"),
        'return torch.device("cuda", place.slot)': ("the same", "`tests/gpu`"),
        'if setup.rank.gradient_checkpointing == "auto" and device.type == "cuda":': (
            "activations are kept as far as the GPU has room",
            "each choice (`tests/learner/rank/test_activation_checkpointing.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/checkpointing_choice.py": {
        "size = torch.cuda.get_device_properties(policy.device).total_memory": (
            "the same",
            "the same tests",
        ),
        "allocated = torch.cuda.memory_allocated(policy.device)": ("the same", "the same tests"),
    },
    "services/learner/flotilla_learner/rank/serving_rank.py": {
        'if setup.rank.gradient_checkpointing == "auto" and device.type == "cuda":': (
            "the same, next to models of callers",
            "the same tests",
        ),
        "free, total = torch.cuda.mem_get_info(device)": (
            "memory that others use on the GPU is left to them",
            "the same tests",
        ),
        "return total - free - torch.cuda.memory_reserved(device)": ("the same", "the same tests"),
        'if self._base.policy.device.type == "cuda":': (
            "memory of deleted models goes back to the GPU",
            "it goes back to the host (`tests/learner/training`)",
        ),
        "torch.cuda.empty_cache()": ("the same", "the same tests"),
    },
    "services/learner/flotilla_learner/rank/activation_offload.py": {
        'return save_on_cpu(pin_memory=device.type == "cuda") if enabled else nullcontext()': (
            "blocks' inputs are copied to pinned host memory",
            "they stay where they are (`tests/learner/rank/test_activation_offload.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/segment_places.py": {
        'kernel = None if device.type != "cuda" else make_kernel_places(layout, device, window)': (
            "the places of all segments are copied to the GPU, once per pack",
            "the same places, on a CPU (`tests/learner/rank/test_flash_attention.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/flash_attention.py": {
        "given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)": (
            "all segments of a pack are attended by one call of torch's flash kernel, in half"
            " precision",
            "the same calls, of plain arithmetic to the kernel's contract"
            " (`tests/learner/rank/test_flash_attention.py`); `tests/gpu` runs the kernel",
        ),
        "return query.shape[3] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(given)": (
            "the same",
            "the same tests",
        ),
    },
    "services/learner/flotilla_learner/rank/attention.py": {
        'if query.device.type == "cuda":': (
            "in float32, key heads are copied for the query heads that share them",
            "kernels that share them (`tests/learner/rank/test_model.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/prefix_attention.py": {
        'if query.device.type == "cuda":': (
            "the same after a prefix, which is copied before each segment's keys",
            "segments with windows, and one prefix for all without"
            " (`tests/learner/rank/test_prompt_sharing.py`)",
        ),
    },
    "services/learner/flotilla_learner/rank/burn_in.py": {
        'if self.policy.device.type == "cuda":': (
            "the burn-in reports its peak GPU memory",
            "it reports 0",
        ),
        "device = torch.cuda.max_memory_allocated(self.policy.device)": (
            "the same",
            "it reports 0",
        ),
        "torch.cuda.empty_cache()": ("an engine on the same GPU gets that memory back", "nothing"),
    },
    "services/learner/flotilla_learner/rank/worker.py": {
        'cuda = device.type == "cuda"': (
            "a rank reports the GPU memory of loading",
            "it reports 0",
        ),
        '"device": torch.cuda.max_memory_reserved(device) if cuda else 0,': (
            "the same",
            "it reports 0",
        ),
    },
    "services/learner/flotilla_learner/rank/tensor_shards.py": {
        'self._cuda = device.type == "cuda"': (
            "a snapshot is staged through pinned memory, without blocking",
            "plain copies (`tests/learner/rank`)",
        ),
    },
    "services/rollout/flotilla_rollout/adapters/vllm_weights.py": {
        'if worker.device.type != "cuda":': ("an engine reports its GPU memory", "it reports 0"),
        "free, total = torch.cuda.mem_get_info(worker.device)": ("the same", "it reports 0"),
        "back = torch.cuda.max_memory_reserved(worker.device) - torch.cuda.memory_reserved(": (
            "the same",
            "it reports 0",
        ),
    },
}


def find_gpu_lines() -> Iterator[tuple[str, str]]:
    """Yield file and line of each mention of CUDA or NCCL in code that uses torch."""
    for path in sorted((ROOT / "services").rglob("*.py")):
        text = path.read_text()
        if re.search(r"^\s*(import|from) torch", text, re.MULTILINE):
            yield from ((str(path.relative_to(ROOT)), line) for line in _lines_of(path, text))


def _lines_of(path: Path, text: str) -> Iterator[str]:
    tree, lines = ast.parse(text, path.name), text.splitlines()
    message = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = {
        node.lineno
        for node in ast.walk(tree)
        if id(node) not in message and _is_of_gpus(node) and isinstance(node, ast.expr)
    }
    yield from (lines[number - 1].strip() for number in sorted(found))


def _is_of_gpus(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _NAMES
    return isinstance(node, ast.Constant) and bool(_WORD.search(str(node.value)))
