"""Staging of the policy's model on this machine, from a folder or from the Hugging Face hub.

All code that needs files of a model gets them here: they are in the hub's own cache, whose locks
let the processes of one machine fetch each file once."""

import shutil
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import DryRunFileInfo, HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger

TOKEN_VARIABLE, CACHE_VARIABLE = "HF_TOKEN", "HF_HOME"
# Runs read safetensors, JSON and text only: pickles are refused, and nothing reads the same weights
# in other formats.
LEFT_OUT = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5", "*.onnx", "*.onnx_data"),
    *("*.gguf", "*.tflite", "*.ot", "original/*", "onnx/*", "metal/*", "consolidated*"),
)
PROGRESS_INTERVAL_S = 10.0
GIB = 2**30

log = get_logger(__name__)


class ModelUnavailableError(ConfigError):
    """The model is unavailable; the message names the fix. `refused`: the hub itself refused, so
    every machine would get the same answer."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One commit of a model on the hub, and how many bytes of it are not yet in the cache."""

    commit: str
    size: int
    missing: int
    free: int
    cache: str


def stage_model(model: str, revision: str | None = None) -> Path:
    """Return the folder of a model, fetching it if necessary. Raises ModelUnavailableError."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        found = look_up_model(model, revision)
    except ModelUnavailableError as error:
        if error.refused:
            raise
        # A cached model does not need the hub.
        return fetch_files(model, revision)
    check_disk(model, found)
    with _logging_progress(model, found):
        return fetch_files(model, found.commit)


def fetch_files(
    model: str, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """Return a folder with the files that match `patterns`; the default is all that a run reads.

    Raises ModelUnavailableError."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    disable_progress_bars()
    left_out = list(LEFT_OUT)
    with _explained_errors(model, revision):
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=None if patterns is None else list(patterns),
                ignore_patterns=left_out if patterns is None else None,
            )
        )


def look_up_model(model: str, revision: str | None = None) -> ModelSnapshot:
    """Resolve a revision to a commit on the hub, and measure how much of it is missing here.

    The request is the one that a download makes, so any refusal shows up now. Raises
    ModelUnavailableError."""
    disable_progress_bars()
    with _explained_errors(model, revision):
        files: list[DryRunFileInfo] = snapshot_download(
            model, revision=revision, ignore_patterns=list(LEFT_OUT), dry_run=True
        )
    if not files:
        raise ModelUnavailableError(f"policy.model: {model} has no file", refused=True)
    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    return ModelSnapshot(
        commit=files[0].commit_hash,
        size=sum(file.file_size or 0 for file in files),
        missing=sum(file.file_size or 0 for file in files if file.will_download),
        free=shutil.disk_usage(there).free,
        cache=str(cache),
    )


def check_access(model: str) -> None:
    """Check that this account may read a model, on whichever machine it will be fetched.

    Raises ModelUnavailableError."""
    with _explained_errors(model, None):
        HfApi().auth_check(model)


def check_disk(model: str, found: ModelSnapshot) -> None:
    """Raise ModelUnavailableError if the missing files do not fit on the disk."""
    if found.missing > found.free:
        raise ModelUnavailableError(
            f"policy.model: {model} takes {_format_gib(found.missing)} more in {found.cache}, and"
            f" {_format_gib(found.free)} are free there: free some, or set {CACHE_VARIABLE} to a"
            " folder on a larger disk",
            refused=False,
        )


def _format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


@contextmanager
def _explained_errors(model: str, revision: str | None) -> Generator[None]:
    try:
        yield
    # The hub's client raises its own errors, its HTTP library's and OSErrors.
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DryRunError) else None
        raise _explain_error(model, revision, cause or error) from error


def _explain_error(model: str, revision: str | None, error: BaseException) -> ModelUnavailableError:
    page = f"{constants.ENDPOINT}/{model}"
    if isinstance(error, GatedRepoError):
        who = (
            f"the account of {TOKEN_VARIABLE} may not read it: accept its licence on {page}"
            if get_token()
            else f"{TOKEN_VARIABLE} is not set: accept its licence on {page}, and set"
            f" {TOKEN_VARIABLE} to a token of the account that did"
        )
        return ModelUnavailableError(f"policy.model: {model} is gated, and {who}", refused=True)
    if isinstance(error, RevisionNotFoundError):
        return ModelUnavailableError(
            f"policy.revision: {page} has no revision {revision!r}", refused=True
        )
    if isinstance(error, RepositoryNotFoundError):
        what = "is neither a folder here nor a model on the hub that we may see"
        return ModelUnavailableError(
            f"policy.model: {model} {what} ({page}): correct it, or set {TOKEN_VARIABLE} for a"
            " private one",
            refused=True,
        )
    first_line = (str(error).splitlines() or [""])[0]
    return ModelUnavailableError(
        f"policy.model: {model} is neither a folder here nor a model on the hub that can be"
        f" reached: {type(error).__name__}: {first_line}",
        refused=isinstance(error, HfHubHTTPError | HFValidationError),
    )


@contextmanager
def _logging_progress(model: str, found: ModelSnapshot) -> Generator[None]:
    """Log the progress of a download that takes long."""
    if not found.missing:
        yield
        return
    log.info(
        "downloading model",
        model=model,
        revision=found.commit,
        gib=round(found.missing / GIB, 3),
        cache=found.cache,
    )
    blobs = Path(found.cache) / f"models--{model.replace('/', '--')}" / "blobs"
    before, over = _folder_bytes(blobs), threading.Event()

    def log_progress() -> None:
        while not over.wait(PROGRESS_INTERVAL_S):
            share = min(1.0, (_folder_bytes(blobs) - before) / found.missing)
            log.info("downloading model", model=model, percent=round(100 * share))

    reporter = threading.Thread(target=log_progress, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()
    log.info("model downloaded", model=model, revision=found.commit)


def _folder_bytes(folder: Path) -> int:
    # A completed file may be renamed between the listing and the stat.
    sizes = (path.stat().st_size for path in folder.glob("*") if path.exists())
    return sum(sizes)
