"""Pages of a run as files: a zip that opens in any browser, without a server.

It holds the run's page, the curves, the chosen steps and all their attempts, with the tokens' data
in the pages themselves, because browsers let no file read another."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla_reading.inspector.pages.book import PageBook
from flotilla_reading.inspector.pages.curves import curves_page
from flotilla_reading.inspector.pages.links import (
    BundleLinks,
    Links,
    attempt_file,
    file_name,
    media_file,
    raw_file,
    step_file,
)
from flotilla_reading.inspector.pages.messages import image_type, raw_text
from flotilla_reading.inspector.pages.page import Page
from flotilla_reading.inspector.pages.visible_text import MOST_CHARACTERS
from flotilla_reading.inspector.queries.episodes import Episode
from flotilla_reading.inspector.queries.group_rows import TryRow
from flotilla_reading.inspector.queries.imitated_steps import read_imitated
from flotilla_reading.inspector.queries.run_folders import read_journal
from flotilla_reading.inspector.queries.run_library import RunLibrary
from flotilla_reading.inspector.queries.step_pages import StepPage, read_step

# For files, browsers treat 'self' as nothing, or as every file.
BUNDLE_POLICY = (
    "default-src 'none'; style-src 'self' file:; script-src 'self' file:; img-src 'self' file:"
    " data:; base-uri 'none'; form-action 'none'"
)


@dataclass(slots=True)
class _Contents:
    """Content of a bundle: paths, and the source of each."""

    steps: list[StepPage] = field(default_factory=list[StepPage])
    tries: list[TryRow] = field(default_factory=list[TryRow])


@dataclass(frozen=True, slots=True)
class BundleMaker:
    """Writes bundles of the runs in a library."""

    library: RunLibrary
    # Returns a page as HTML, with its content security policy.
    render: Callable[[Page, Links, str], str]
    # The folder of styles and scripts.
    static: Path

    def write(self, path: Path, run: str, steps: Sequence[int] | None) -> dict[str, Any]:
        """Write a bundle of some steps of a run, by default the last; return its content.

        Raises NotFoundError, and OSError if it cannot be written."""
        contents = self._collect(run, steps)
        paths = set(_paths_of(run, contents))
        partial = path.with_name(f"{path.name}.partial")
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in self._files(run, contents, paths):
                file.writestr(name, data)
        partial.replace(path)
        held = [step.step for step in contents.steps]
        return {"bundle": str(path), "steps": held, "attempts": len(contents.tries)}

    def _collect(self, run: str, steps: Sequence[int] | None) -> _Contents:
        contents, folder = _Contents(), self.library.open(run).folder
        with read_journal(folder) as db:
            if not steps:
                (last,) = db.execute("SELECT max(step) FROM plans").fetchone()
                steps = [] if last is None else [last]
            for step in dict.fromkeys(steps):
                first = read_step(db, step)
                pages = [
                    first,
                    *(read_step(db, step, n) for n in range(2, first.trained.pages + 1)),
                ]
                contents.steps += pages
                groups = [group for page in pages for group in page.trained.groups]
                contents.tries += [row for group in groups for row in group.tries]
                if not first.attempts:
                    imitated = read_imitated(folder, step).sequences
                    contents.tries += [each.row for each in imitated]
        return contents

    def _files(
        self, run: str, contents: _Contents, paths: set[str]
    ) -> Iterator[tuple[str, str | bytes]]:
        yield from self._static_files()
        yield from self._page_files(run, contents, paths)
        for row in contents.tries:
            yield from self._attempt_files(run, row, paths)

    def _static_files(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted(self.static.rglob("*")):
            if path.is_file():
                yield f"static/{path.relative_to(self.static).as_posix()}", path.read_bytes()

    def _page_files(
        self, run: str, contents: _Contents, paths: set[str]
    ) -> Iterator[tuple[str, str]]:
        where = f"{file_name(run)}/index.html"
        yield self._page(where, paths, lambda book: book.run(run))
        yield self._page("index.html", paths, lambda book: book.run(run))
        yield self._page("curves.html", paths, lambda _: curves_page(self.library, [run], []))
        for step in contents.steps:
            number, page = step.step, step.trained.page
            name = step_file(run, number, page)
            yield self._page(name, paths, lambda book, n=number, p=page: book.step(run, n, p))

    def _attempt_files(
        self, run: str, row: TryRow, paths: set[str]
    ) -> Iterator[tuple[str, str | bytes]]:
        episode = self.library.open(run).shelf.read(row.key)
        extra = dict(_extra_files(run, row, episode))
        further = {attempt_file(run, row, "tokens", n) for n in range(1, len(episode.tracks))}
        held = paths | extra.keys() | further
        yield from extra.items()
        name = attempt_file(run, row)
        yield self._page(name, held, lambda book: book.conversation(run, episode))
        for number in range(max(1, len(episode.tracks))):
            name = attempt_file(run, row, "tokens", number)
            yield self._page(name, held, lambda book, n=number: book.tokens(run, episode, n))

    def _page(self, name: str, paths: set[str], make: Any) -> tuple[str, str]:
        links = BundleLinks(name, paths)
        book = PageBook(self.library, links, inline=True)
        return name, self.render(make(book), links, BUNDLE_POLICY)


def _paths_of(run: str, contents: _Contents) -> Iterator[str]:
    yield from ("index.html", "curves.html", f"{file_name(run)}/index.html")
    for step in contents.steps:
        yield step_file(run, step.step, step.trained.page)
    for row in contents.tries:
        yield attempt_file(run, row)
        yield attempt_file(run, row, "tokens")


def _extra_files(run: str, row: TryRow, episode: Episode) -> Iterator[tuple[str, bytes]]:
    """Yield long texts and screenshots of the last sequence, the one that is shown."""
    number = len(episode.sequences) - 1
    if number < 0:
        return
    parts = [
        f"message-{index}"
        for index, message in enumerate(episode.sequences[number].messages)
        if len(message.content) > MOST_CHARACTERS
    ]
    for index, item in enumerate(episode.trajectory.sequences[number].media):
        if image_type(item.content):
            yield media_file(run, row, number, index), item.content
        elif item.content:
            parts.append(f"answer-{index}")
    for part in parts:
        text = raw_text(episode, number, part)
        yield raw_file(run, row, number, part), text.encode(errors="replace")
