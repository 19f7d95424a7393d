"""Export of a checkpoint as a model folder in Hugging Face's format, for transformers and vLLM.

The parts of all ranks are joined, one tensor at a time. The weights are rounded to the dtype that
the run was served in; the configuration is the run's own, including its rope scaling; a head that
shares the embedding's weights is stored once.
Adapters are merged into their base model; `export_adapters` writes them separately, for PEFT.
The parts of a multimodal model that are not trained come from its own files, byte for byte.
`SHA256SUMS` lists all files: `sha256sum -c SHA256SUMS` checks them."""

import asyncio
import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from flotilla_common.files.durable_files import sha256_of, sync_path, write_durably
from flotilla_common.files.json_files import read_json_object
from flotilla_common.models.multimodal_models import is_multimodal, name_in_files, other_parts
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.checkpoints.merged_model import ADAPTER_CONFIG, write_merged_model
from flotilla_learner.checkpoints.number_formats import SERVED_DTYPES, to_bfloat16
from flotilla_learner.checkpoints.tensor_files import TensorSpan, encode_header
from flotilla_learner.checkpoints.tensor_parts import (
    ADAPTERS,
    SplitTensor,
    find_model_tensors,
    find_tensors,
)
from flotilla_learner.checkpoints.tensor_parts import MODEL as TRAINED
from flotilla_learner.journal.store import Journal

SUMS = "SHA256SUMS"
MODEL, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
# PEFT's name for the file of adapter tensors.
ADAPTER_FILE = "adapter_model.safetensors"
# Other files of a model folder: tokenizer, chat template, processors.
ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    GENERATION,
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
)
# A model's own code is copied only if the run trusts and runs it.
_CODE = "*.py"

_CHUNK_ITEMS = 1 << 22
_log = get_logger(__name__)


class ExportError(Exception):
    """The folder could not be written and was removed; the message gives the reason."""


def export_model(checkpoint: Path, assets: Path, policy: PolicyConfig, out: Path) -> None:
    """Write the model of a checkpoint to `out`, replacing existing content, atomically.

    `assets` is the folder of `policy.model`; with adapters, or parts that are
    not trained, its weights are read, too. Raises
    ExportError."""
    with _replacing(checkpoint, out) as partial:
        base = find_model_tensors(assets) if holds_other_parts(checkpoint) else {}
        untouched = {name: base[name] for name in other_parts(base)}
        if has_adapters(checkpoint):
            write_merged_model(checkpoint, assets, partial / MODEL, policy.dtype, untouched)
        else:
            trained = find_tensors(checkpoint, TRAINED)
            named = {name_in_files(name, base): tensor for name, tensor in trained.items()}
            # A policy that sees pictures has these in its checkpoints, too.
            rest = {name: each for name, each in untouched.items() if name not in named}
            _write_tensors(named, partial / MODEL, policy.dtype, rest)
        # A published configuration stays, unless the run has changed it.
        published = base and policy.rope_scaling is None
        config = (assets if published else checkpoint) / CONFIG
        _write_config(config, partial / CONFIG, policy.dtype)
        _copy_assets(assets, partial, code=policy.trust_remote_code)
        if not (partial / GENERATION).exists():
            _write_generation_config(partial)


def export_adapters(checkpoint: Path, assets: Path | None, out: Path) -> None:
    """Write the adapters of a checkpoint to `out`, as PEFT's `from_pretrained` loads them, with the
    tokenizer of `assets`, if given. Raises ExportError."""
    if not has_adapters(checkpoint):
        raise ExportError(
            f"{checkpoint} holds a whole model: the run trains no adapters (learner.lora); export"
            " it without --adapters"
        )
    with _replacing(checkpoint, out) as partial:
        _write_tensors(find_tensors(checkpoint, ADAPTERS), partial / ADAPTER_FILE, "float32")
        write_durably(partial / ADAPTER_CONFIG, (checkpoint / ADAPTER_CONFIG).read_bytes())
        if assets is not None:
            _copy_assets(assets, partial, code=False)


def has_adapters(checkpoint: Path) -> bool:
    """Return True for a checkpoint that holds only adapters."""
    return (checkpoint / ADAPTER_CONFIG).exists()


def holds_other_parts(checkpoint: Path) -> bool:
    """Return True for a checkpoint of a model that has parts which are not trained."""
    return is_multimodal(read_json_object(checkpoint / CONFIG))


@contextmanager
def _replacing(checkpoint: Path, out: Path) -> Generator[Path]:
    """Yield an empty folder that becomes `out` with its sums. Raises ExportError."""
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _write_sums(partial)
        _replace_folder(partial, out)
    except (OSError, ValueError, KeyError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        problem = f"the model of {checkpoint} cannot be exported to {out}: {error}"
        raise ExportError(problem) from error


async def export_newest(
    journal: Journal, run_dir: Path, write: Callable[[Path, Path], None] | None
) -> None:
    """Export the model that a run has trained to its folder.

    `write` receives the folder of a checkpoint and that of the model. Without it, or without a
    checkpoint, nothing is exported."""
    rows = await journal.list_checkpoints()
    if write is None or not rows:
        return
    checkpoint = run_dir / "checkpoints" / Path(rows[0].directory).name
    await asyncio.to_thread(write, checkpoint, run_dir / "model")
    _log.info("exported", step=rows[0].step, folder=str(run_dir / "model"))


def _write_tensors(
    tensors: Mapping[str, SplitTensor],
    target: Path,
    dtype: str,
    untouched: Mapping[str, SplitTensor] = MappingProxyType({}),
) -> None:
    """Write tensors, rounded to a dtype, and behind them others as they are."""
    kind, joined = SERVED_DTYPES[dtype], {**tensors, **untouched}
    kinds = {name: kind if each.dtype == "F32" else each.dtype for name, each in tensors.items()}
    header = encode_header(
        (name, kinds.get(name, tensor.dtype), tensor.shape) for name, tensor in joined.items()
    )
    with target.open("wb") as write:
        write.write(header)
        for name, tensor in joined.items():
            for part in tensor.parts:
                with part.path.open("rb") as read:
                    _copy_part(read, write, part.span, kinds.get(name, tensor.dtype))
        write.flush()
        os.fsync(write.fileno())


def _copy_part(read: BinaryIO, write: BinaryIO, span: TensorSpan, kind: str) -> None:
    """Copy one part of a tensor in pieces."""
    rounded = span.dtype == "F32" and kind == "BF16"
    read.seek(span.begin)
    left = span.end - span.begin
    while left:
        data = read.read(min(left, _CHUNK_ITEMS * 4))
        if not data:
            raise ValueError(f"{read.name} ends too early")
        left -= len(data)
        write.write(to_bfloat16(np.frombuffer(data, "<f4")).tobytes() if rounded else data)


def _write_config(source: Path, target: Path, dtype: str) -> None:
    config: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    _write_json(target, {**config, "dtype": dtype})


def _write_generation_config(folder: Path) -> None:
    """Write the ids that end a generation, from the model's configuration."""
    config: Mapping[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: config[name] for name in names if config.get(name) is not None}
    _write_json(folder / GENERATION, {"do_sample": True, "temperature": 1.0, **ids})


def _copy_assets(source: Path, target: Path, *, code: bool) -> None:
    patterns = (*ASSETS, _CODE) if code else ASSETS
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_durably(target / name, path.read_bytes())


def _write_sums(folder: Path) -> None:
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    text = "".join(f"{sha256_of(folder / name)}  {name}\n" for name in names)
    write_durably(folder / SUMS, text.encode())


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(data, indent=2, sort_keys=True) + "\n").encode())


def _replace_folder(partial: Path, out: Path) -> None:
    for path in (partial, *(p for p in partial.rglob("*") if p.is_dir())):
        sync_path(path)
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    sync_path(out.parent)
    shutil.rmtree(old, ignore_errors=True)
