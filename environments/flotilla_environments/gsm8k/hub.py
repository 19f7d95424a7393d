"""Data sets on the Hugging Face hub: finding the files of a split, and fetching them."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

# The command that installs what questions are read with.
INSTALL = (
    "pip install 'flotilla-rl-environments[gsm8k]' (in a checkout: uv pip install -e '.[gsm8k]')"
)
_TIMEOUT_S = 30.0
_SUFFIXES = (".parquet", ".jsonl")


class HubError(Exception):
    """The data set is unavailable; the message has the reason and the fix."""


def fetch_split(dataset: str, split: str, subset: str | None) -> list[Path]:
    """Download the files of a split, in order; cached by the hub's client. Raises `HubError`."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise HubError(
            f"{dataset!r} is no file, and a data set of the hub needs huggingface-hub to be "
            f"fetched: {INSTALL}"
        ) from error
    try:
        files = HfApi().dataset_info(dataset, timeout=_TIMEOUT_S).siblings or []
        chosen = choose_files([file.rfilename for file in files], dataset, split, subset)
        return [Path(hf_hub_download(dataset, name, repo_type="dataset")) for name in chosen]
    except HubError:
        raise
    except HFValidationError as error:
        raise HubError(f"{dataset!r} is neither a file nor the id of a data set") from error
    except Exception as error:
        # Errors of the client's HTTP library pass through unchanged.
        raise HubError(f"data set {dataset!r} could not be fetched: {error}") from error


def choose_files(names: Sequence[str], dataset: str, split: str, subset: str | None) -> list[str]:
    """Choose the files of a split, whose names begin with it: `main/train-00000-of-00001.parquet`,
    `train.jsonl`.

    Raises `HubError` if there is none, or several subsets have one."""
    of_split = re.compile(rf"{re.escape(split)}([-_.].*)?")
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix in _SUFFIXES and of_split.fullmatch(path.name):
            found.setdefault(str(path.parent), []).append(name)
    if subset is not None:
        found = {folder: files for folder, files in found.items() if folder == subset}
    if not found:
        where = f"{dataset!r}, subset {subset!r}," if subset is not None else f"{dataset!r}"
        raise HubError(f"data set {where} has no file {split}*.parquet or {split}*.jsonl")
    if len(found) > 1:
        raise HubError(
            f"data set {dataset!r} has {split!r} in {', '.join(found)}; choose one with --subset"
        )
    return next(iter(found.values()))
