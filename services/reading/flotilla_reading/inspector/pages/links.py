"""Addresses of pages: below a server's root, or as files of a bundle beside one another."""

import hashlib
import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol
from urllib.parse import quote, urlencode

from flotilla_reading.inspector.queries.group_rows import TryRow


class Links(Protocol):
    """Addresses of pages; "" for a missing page. Pages that need a server are missing by
    default."""

    def home(self) -> str: ...
    def run(self, run: str) -> str: ...
    def step(self, run: str, step: int, page: int = 1) -> str: ...
    def attempt(self, run: str, row: TryRow, view: str = "conversation") -> str: ...
    def sequence(self, run: str, row: TryRow, view: str, sequence: int) -> str: ...
    def raw(self, run: str, row: TryRow, sequence: int, part: str) -> str: ...
    def media(self, run: str, row: TryRow, sequence: int, number: int) -> str: ...
    def curves(self, runs: Sequence[str] = ()) -> str: ...
    def static(self, name: str) -> str: ...

    def live(self, run: str) -> str:
        return ""

    def steps(self, run: str, before: int | None = None) -> str:
        return ""

    def eval(self, run: str, eval_id: str, page: int = 1) -> str:
        return ""

    def analysis(self, run: str) -> str:
        return ""

    def table(self, run: str, row: TryRow, sequence: int, page: int) -> str:
        return ""

    def tokens(self, run: str, row: TryRow, sequence: int) -> str:
        return ""

    def hold(self, run: str, row: TryRow) -> str:
        return ""

    def search(self, run: str, query: Mapping[str, str] | None = None) -> str:
        return ""

    def task(self, run: str, task_key: str, before: int | None = None) -> str:
        return ""

    def compare(self, task_key: str = "", run: str = "", row: TryRow | None = None) -> str:
        return ""


class ServerLinks(Links):
    """Addresses below a server's root."""

    def home(self) -> str:
        return "/"

    def run(self, run: str) -> str:
        return f"/runs/{quote(run, safe='')}"

    def live(self, run: str) -> str:
        return f"{self.run(run)}/live.html"

    def steps(self, run: str, before: int | None = None) -> str:
        return f"{self.run(run)}/steps" + _query(before=before)

    def step(self, run: str, step: int, page: int = 1) -> str:
        return f"{self.run(run)}/steps/{step}" + _query(page=page if page > 1 else None)

    def eval(self, run: str, eval_id: str, page: int = 1) -> str:
        where = f"{self.run(run)}/evals/{quote(eval_id, safe='')}"
        return where + _query(page=page if page > 1 else None)

    def analysis(self, run: str) -> str:
        return f"{self.run(run)}/analysis"

    def attempt(self, run: str, row: TryRow, view: str = "conversation") -> str:
        return self._attempt(run, row) + _query(view=view if view != "conversation" else None)

    def table(self, run: str, row: TryRow, sequence: int, page: int) -> str:
        where = _query(view="table", sequence=sequence or None, page=page if page > 1 else None)
        return self._attempt(run, row) + where

    def sequence(self, run: str, row: TryRow, view: str, sequence: int) -> str:
        return self._attempt(run, row) + _query(view=view, sequence=sequence or None)

    def tokens(self, run: str, row: TryRow, sequence: int) -> str:
        return f"{self._attempt(run, row)}/tokens.bin" + _query(sequence=sequence)

    def raw(self, run: str, row: TryRow, sequence: int, part: str) -> str:
        return f"{self._attempt(run, row)}/raw/{sequence}/{part}"

    def media(self, run: str, row: TryRow, sequence: int, number: int) -> str:
        return f"{self._attempt(run, row)}/media/{sequence}/{number}"

    def hold(self, run: str, row: TryRow) -> str:
        return f"{self._attempt(run, row)}/hold"

    def search(self, run: str, query: Mapping[str, str] | None = None) -> str:
        return f"{self.run(run)}/attempts" + _query(**query or {})

    def task(self, run: str, task_key: str, before: int | None = None) -> str:
        return f"{self.run(run)}/task" + _query(key=task_key, before=before)

    def compare(self, task_key: str = "", run: str = "", row: TryRow | None = None) -> str:
        where = _query(task=task_key, run=run, attempt=attempt_id(row)) if row else ""
        return f"/compare{where}"

    def curves(self, runs: Sequence[str] = ()) -> str:
        return "/curves" + (f"?{urlencode({'run': runs}, doseq=True)}" if runs else "")

    def static(self, name: str) -> str:
        return f"/static/{name}"

    def _attempt(self, run: str, row: TryRow) -> str:
        group = quote(row.group_id, safe="")
        return f"{self.run(run)}/attempts/{group}/{row.index}/{row.attempt_try}"


class BundleLinks(Links):
    """Addresses of a bundle's files, whose `paths` are given, relative to the one at `here`."""

    def __init__(self, here: str, paths: Collection[str]) -> None:
        self._here = posixpath.dirname(here)
        self._paths = paths

    def home(self) -> str:
        return self._relative("index.html")

    def run(self, run: str) -> str:
        return self._relative(f"{file_name(run)}/index.html")

    def step(self, run: str, step: int, page: int = 1) -> str:
        return self._relative(step_file(run, step, page))

    def attempt(self, run: str, row: TryRow, view: str = "conversation") -> str:
        return self._relative(attempt_file(run, row, view)) if view != "table" else ""

    def sequence(self, run: str, row: TryRow, view: str, sequence: int) -> str:
        return self._relative(attempt_file(run, row, view, sequence))

    def raw(self, run: str, row: TryRow, sequence: int, part: str) -> str:
        return self._relative(raw_file(run, row, sequence, part))

    def media(self, run: str, row: TryRow, sequence: int, number: int) -> str:
        return self._relative(media_file(run, row, sequence, number))

    def curves(self, runs: Sequence[str] = ()) -> str:
        return self._relative("curves.html")

    def static(self, name: str) -> str:
        return posixpath.relpath(f"static/{name}", self._here or ".")

    def _relative(self, path: str) -> str:
        if path not in self._paths:
            return ""
        return quote(posixpath.relpath(path, self._here or "."), safe="/.")


def attempt_id(row: TryRow) -> str:
    """Return the name of an attempt in an address: group, attempt and try."""
    return f"{row.group_id}/{row.index}/{row.attempt_try}"


def step_file(run: str, step: int, page: int = 1) -> str:
    """Return the path of a step's page in a bundle."""
    return f"{file_name(run)}/step-{step}" + (f"-{page}" if page > 1 else "") + ".html"


def attempt_file(run: str, row: TryRow, view: str = "conversation", sequence: int = 0) -> str:
    """Return the path of an attempt's page in a bundle."""
    part = f".{sequence}" if sequence else ""
    return f"{_attempt_stem(run, row)}.{view}{part}.html"


def raw_file(run: str, row: TryRow, sequence: int, part: str) -> str:
    """Return the path of a long text in a bundle."""
    return f"{_attempt_stem(run, row)}.{sequence}.{file_name(part)}.txt"


def media_file(run: str, row: TryRow, sequence: int, number: int) -> str:
    """Return the path of a screenshot in a bundle."""
    return f"{_attempt_stem(run, row)}.{sequence}.{number}.image"


def file_name(text: str) -> str:
    """Return a unique file name for a text of any characters."""
    if text.replace("-", "").replace("_", "").isalnum() and text.isascii() and len(text) < 100:
        return text
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in text)[:60]
    return f"{stem}.{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"


def _attempt_stem(run: str, row: TryRow) -> str:
    return f"{file_name(run)}/{file_name(row.group_id)}-{row.index}-{row.attempt_try}"


def _query(**values: object) -> str:
    given = {name: value for name, value in values.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""
