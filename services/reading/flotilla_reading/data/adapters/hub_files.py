"""Files of a data set on the Hugging Face hub, pinned to a commit. The hub's client keeps them in
its own cache, goes on with downloads that were interrupted, and shows their progress."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from flotilla_common.text.redaction import redact
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.sources import Fetched, SourceFile

_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
_FORM = "hf://datasets/OWNER/NAME[@REVISION][/FILE]"
_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
_TIMEOUT_S = 30.0
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Named:
    dataset: str
    revision: str | None
    wanted: str


def fetch_hub_files(url: str) -> Fetched:
    """Return the files of a data set that a URL names: one file, those of a folder, those that
    match a pattern, or the only one. Raises DataError."""
    named = _parse_url(url)
    with _explained_errors(named):
        about = HfApi().dataset_info(named.dataset, revision=named.revision, timeout=_TIMEOUT_S)
        commit = about.sha or ""
        names = _choose_files([each.rfilename for each in about.siblings or []], named)
        files = [
            SourceFile(name, Path(_download(named.dataset, name, commit)).read_bytes())
            for name in names
        ]
    return Fetched("hub", url, files, revision=commit)


def _parse_url(url: str) -> _Named:
    match = _URL.fullmatch(url.rstrip("/"))
    if match is None:
        raise DataError(f"{url} is not of the form {_FORM}")
    # A revision may be a branch such as refs/pr/1, whose slashes are written as %2F.
    revision = match[2] and match[2].replace("%2F", "/").replace("%2f", "/")
    return _Named(match[1], revision, match[3] or "")


def _choose_files(names: Sequence[str], named: _Named) -> list[str]:
    if named.wanted in names:
        return [named.wanted]
    data = sorted(name for name in names if PurePosixPath(name).suffix in _SUFFIXES)
    wanted = named.wanted
    found = [
        name
        for name in data
        if not wanted or fnmatchcase(name, wanted) or name.startswith(f"{wanted}/")
    ]
    if not found:
        raise DataError(
            f"{named.dataset} has no file {wanted or ' or '.join(_SUFFIXES)};"
            f" it has {_list(data) or 'none to read'}"
        )
    if not wanted and len(found) > 1:
        raise DataError(
            f"{named.dataset} has {len(found)} files: name one, a folder, or a pattern with *:"
            f" {_list(found)}"
        )
    return found


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _download(dataset: str, name: str, commit: str) -> str:
    return hf_hub_download(dataset, name, repo_type="dataset", revision=commit)


@contextmanager
def _explained_errors(named: _Named) -> Generator[None]:
    page = f"{constants.ENDPOINT}/datasets/{named.dataset}"
    key = "check HF_TOKEN" if get_token() else "set HF_TOKEN"
    try:
        yield
    except DataError:
        raise
    except GatedRepoError as error:
        raise DataError(f"{page} is gated: accept its licence there, and {key}") from error
    except RevisionNotFoundError as error:
        raise DataError(f"{page} has no revision {named.revision!r}") from error
    except RepositoryNotFoundError as error:
        raise DataError(f"{page} does not exist; if it is private, {key}") from error
    except EntryNotFoundError as error:
        raise DataError(f"{page} has no file {named.wanted!r}") from error
    except HfHubHTTPError as error:
        hint = f"; {key}" if error.response.status_code in (401, 403) else ""
        raise DataError(f"{page}: {redact(str(error).splitlines()[0])}{hint}") from error
    # The errors of the hub's HTTP library pass through its client unchanged.
    except Exception as error:
        raise DataError(f"{page}: {type(error).__name__}: {redact(str(error))}") from error
