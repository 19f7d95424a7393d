"""Transcripts in the viewer of Inspect AI: its own static files, and logs that it reads by byte
ranges, as it reads those of a bundle. None of Inspect AI's Python runs in this process.

The viewer has its own content security policy, looser than ours: it allows style attributes, and
WebAssembly, which unpacks logs. It applies only below `viewer/`, and lets nothing be loaded from
elsewhere. Text of episodes is shown as plain text: `trust_content` is false."""

import json
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from services.common.domain.attempts import AttemptKey
from services.common.log import get_logger
from services.learner.inspector.adapters.rendering import PageRenderer
from services.learner.inspector.adapters.web import read_number
from services.learner.inspector.pages.book import Crumb, Page
from services.learner.inspector.pages.links import TRANSCRIPTS, ServerLinks
from services.learner.inspector.queries.run_folders import NotFoundError, read_journal
from services.learner.inspector.queries.run_library import RunLibrary
from services.learner.inspector.queries.transcript_attempts import (
    TranscriptAttempts,
    TranscriptSubject,
    fingerprint,
    read_attempts,
    sample_place,
)
from services.learner.inspector.transcript_maker import Transcript, TranscriptMaker, log_name

_PACKAGE = "inspect_ai"
_AGAIN_S = 1
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Viewer:
    """Inspect AI's viewer: its folder of files, its page, and its security policy."""

    folder: Path
    page: str
    policy: str


@contextmanager
def transcript_mounts(
    library: RunLibrary, policy: Path | None = None
) -> Generator[Mapping[str, ASGIApp]]:
    """Make the applications that serve transcripts, by path; none without Inspect AI.

    `policy` is the model folder with the tokenizer, if not the run's."""
    viewer = find_viewer()
    if viewer is None:
        yield {}
        return
    with closing(TranscriptMaker(policy)) as maker:
        yield {TRANSCRIPTS: TranscriptPages(library, maker, viewer).app()}


def find_viewer() -> Viewer | None:
    """Find the viewer, without importing Inspect AI; return None if it is not installed."""
    package = util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "_view" / "dist"
    try:
        page = (folder / "index.html").read_text(encoding="utf-8")
        policy = json.loads((folder / "content-security-policy.json").read_text(encoding="utf-8"))
        return Viewer(folder, _with_context(page), _join_policy(policy["directives"]))
    except (OSError, ValueError, KeyError) as error:
        _log.warning("the viewer of Inspect AI is not as expected", error=str(error))
        return None


def _with_context(page: str) -> str:
    """Configure the viewer's page: where logs are, and not to act on their content."""
    version = metadata.version("inspect-ai")
    context = {"log_dir": "logs", "inspect_version": version, "trust_content": False}
    block = f'<script id="log_dir_context" type="application/json">{json.dumps(context)}</script>'
    head, mark, rest = page.partition("</head>")
    if not mark:
        raise ValueError("its page has no head")
    return f"{head}{block}{mark}{rest}"


def _join_policy(directives: Mapping[str, list[str]]) -> str:
    joined = "; ".join(" ".join([name, *sources]) for name, sources in directives.items())
    if "http:" in joined or "https:" in joined or "*" in joined:
        raise ValueError(f"its policy allows content from elsewhere: {joined}")
    return f"{joined}; frame-ancestors 'self'"


class _ViewerFiles(StaticFiles):
    """The viewer's scripts and styles. A worker obeys the policy that its script comes with."""

    def __init__(self, folder: Path, headers: Mapping[str, str]) -> None:
        super().__init__(directory=folder)
        self._headers = headers

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers.update(self._headers)
        return answer


class TranscriptPages:
    """Serves the pages below the transcripts of a run."""

    def __init__(self, library: RunLibrary, maker: TranscriptMaker, viewer: Viewer) -> None:
        self._library = library
        self._maker = maker
        self._viewer = viewer
        self._links = ServerLinks(transcripts=True)
        self._renderer = PageRenderer()
        # Lets browsers revalidate the 11 MB instead of loading them again.
        self._headers = {"Content-Security-Policy": viewer.policy, "Cache-Control": "no-cache"}

    def app(self) -> ASGIApp:
        """Return the application. A bare router: the surrounding application handles errors."""
        return Router(
            [
                Route("/steps/{step}", self.step),
                Route("/evals/{eval_id}", self.eval),
                Route("/viewer/", self.viewer),
                Route("/viewer/logs/listing.json", self.listing),
                Route("/viewer/logs/{name}", self.log),
                Mount(
                    "/viewer/assets", _ViewerFiles(self._viewer.folder / "assets", self._headers)
                ),
            ]
        )

    def step(self, request: Request) -> Response:
        return self._show(request, TranscriptSubject(read_number(request.path_params, "step")))

    def eval(self, request: Request) -> Response:
        return self._show(request, TranscriptSubject(eval_id=request.path_params["eval_id"]))

    def viewer(self, request: Request) -> Response:
        self._folder_of(request)
        return Response(self._viewer.page, media_type="text/html", headers=self._headers)

    def listing(self, request: Request) -> Response:
        made = self._maker.made(self._folder_of(request))
        return JSONResponse({name: each.listed for name, each in made.items()})

    def log(self, request: Request) -> Response:
        found = self._maker.made(self._folder_of(request)).get(request.path_params["name"])
        if found is None:
            raise NotFoundError("This transcript no longer exists; open its step again.")
        return FileResponse(found.path, media_type="application/octet-stream")

    def _show(self, request: Request, subject: TranscriptSubject) -> Response:
        """Redirect to a finished transcript; else have it made, and reload in a moment."""
        folder = self._folder_of(request)
        with read_journal(folder) as db:
            attempts = read_attempts(db, subject)
            digest = fingerprint(db, folder, subject, attempts)
        found = self._maker.want(folder, subject, digest)
        if found.listed is None:
            return self._wait(request, found)
        where = f"{self._links.run(folder.name)}/transcripts/viewer/"
        place = _place_of(request, attempts)
        return RedirectResponse(f"{where}#/logs/{quote(log_name(subject))}{place}", 303)

    def _wait(self, request: Request, found: Transcript) -> Response:
        run, subject = found.run_dir.name, found.subject
        if subject.step is None:
            above = Crumb(subject.title, self._links.eval(run, subject.eval_id))
        else:
            above = Crumb(subject.title, self._links.step(run, subject.step))
        query = f"?{request.url.query}" if request.url.query else ""
        values = {
            "subject": subject.title,
            "problem": found.problem,
            "again": f"{request.url.path}{query}",
            "run": run,
            "crumbs": (Crumb(run, self._links.run(run)), above),
        }
        page = Page("transcript.html", f"Transcript of {subject.title}", values)
        text = self._renderer.render(page, self._links).encode(errors="replace")
        headers = {} if found.problem else {"Refresh": f"{_AGAIN_S}"}
        status = 500 if found.problem else 202
        return Response(text, status, headers, "text/html; charset=utf-8")

    def _folder_of(self, request: Request) -> Path:
        return self._library.open(request.path_params["run"]).folder


def _place_of(request: Request, attempts: TranscriptAttempts) -> str:
    """Return the place of an attempt within its log; "" for all, or for one that was left out."""
    query = request.query_params
    if "group" not in query:
        return ""
    index, attempt_try = read_number(query, "index", 0), read_number(query, "attempt_try", 0)
    key = AttemptKey(query["group"], index, attempt_try)
    if all(row.key != key for _, row in attempts.tries):
        return ""
    sample, epoch = sample_place(key)
    return f"/samples/sample/{quote(sample, safe='')}/{epoch}/"
