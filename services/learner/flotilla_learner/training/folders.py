"""Folders that a model's state and its exports are written to, whole or not at all."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from flotilla_common.files.durable_files import sha256_of, sync_path
from flotilla_learner.checkpoints.export import ExportError
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training.trained_models import TrainedModel
from flotilla_learner.training_types import WrittenFolder

# Writes what samplers load of the state in the first folder to the second.
Export = Callable[[Path, Path], None]


async def write_state(model: TrainedModel, folder: str) -> WrittenFolder:
    """Write weights and optimizer to a new folder. Raises OperationRefused and RankError."""
    path = _new_folder(folder)
    partial = await _save_aside(model, path, with_optimizer=True)
    try:
        await asyncio.to_thread(_complete, partial, path)
    except OSError as error:
        raise _unusable(path, error) from error
    return WrittenFolder(path, _size_of(path))


async def write_export(model: TrainedModel, folder: str, export: Export) -> WrittenFolder:
    """Write what samplers load to a new folder. Raises OperationRefused and RankError."""
    path = _new_folder(folder)
    state = await _save_aside(model, path, with_optimizer=False)
    try:
        await asyncio.to_thread(export, state, path)
        (weights,) = path.glob("*.safetensors")
        fingerprint = await asyncio.to_thread(sha256_of, weights)
    except (ExportError, OSError, ValueError) as error:
        raise _unusable(path, error) from error
    finally:
        await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)
    return WrittenFolder(path, _size_of(path), bytes.fromhex(fingerprint))


def _new_folder(folder: str) -> Path:
    path = Path(folder)
    if not path.is_absolute():
        raise OperationRefused("FOLDER_UNUSABLE", f"{folder!r} is not an absolute path")
    if path.exists():
        raise OperationRefused("FOLDER_UNUSABLE", f"{folder} exists: name a new folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return path


async def _save_aside(model: TrainedModel, path: Path, *, with_optimizer: bool) -> Path:
    """Have the state written beside `path`; return where."""
    aside = path.with_name(f".{path.name}.state")
    await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
    await model.ranks.save(model.name, aside, model.operation, with_optimizer=with_optimizer)
    return aside


def _complete(partial: Path, path: Path) -> None:
    sync_path(partial)
    partial.rename(path)
    sync_path(path.parent)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _unusable(path: Path, error: Exception) -> OperationRefused:
    return OperationRefused("FOLDER_UNUSABLE", f"{path} cannot be written: {error}")
