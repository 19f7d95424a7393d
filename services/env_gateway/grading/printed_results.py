"""The results that a verifier printed in Fleet's format, and those among them that may be
forged. Pure.

A verifier's other output may contain lines of the same shape, written by the policy."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

from services.common.parsing import TextLimits, parse_literal
from services.env_gateway.grading.authorship import Authorship
from services.env_gateway.grading.policy_writings import Phrase, app_spans
from services.env_gateway.verify.check_report import CHECK_CHARS, CHECKS_KEPT, bounded_checks

_OPENED = re.compile(r">>> (?P<kind>ERROR|SUCCESS)_ACCUMULATOR >>>\n")
# Only this much, from the end of the output, is searched for checks.
_SEARCHED_CHARS = 2**19
# A longer list of checks is read line by line: Python takes milliseconds for each KiB.
_LIST_LIMITS = TextLimits(bytes=2**15, values=4096)
_APP = re.compile(r"^(?P<name>App \S.*?): (?P<passed>[01])[ \t\r]*$", re.MULTILINE)
_APP_START, _APP_VALUE = re.compile(r"App (?=\S)"), re.compile(r": [01]")
_JUDGE_ERROR = re.compile(r"^[^\S\n]*JUDGE ERROR:(?P<detail>.*)$", re.MULTILINE)
# More than any task has apps; each result is searched for in all of the policy's writings.
_APPS_JUDGED = 100
_DOUBTS_KEPT = 5
_DOUBT_CHARS = 200
_PHRASES = {"ERROR": Phrase.FAILED, "SUCCESS": Phrase.PASSED}


@dataclass(frozen=True, slots=True)
class PrintedResults:
    """Results read from a verifier's output. `countable` is set if the checks are complete.
    `doubts` are lines that the policy may have written; they count for nothing."""

    judge_error: str | None = None
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    countable: bool = False
    doubts: tuple[str, ...] = ()


def read_printed(stdout: str, authorship: Authorship, *, cut: bool = False) -> PrintedResults:
    """Read the checks that a verifier printed as passed and as failed, the last print of each,
    and a judge's failure.

    A verifier over several apps prints `App NAME: 0` or `App NAME: 1` for each, and those
    are its checks. Others print lists of passed and failed checks."""
    end = stdout[-_SEARCHED_CHARS:]
    complete = not cut and len(end) == len(stdout)
    apps = list(_APP.finditer(end))
    printed = _read_apps(end, apps, authorship) if apps else _read_lists(end, authorship)
    printed = replace(printed, countable=printed.countable and complete)
    judge = _JUDGE_ERROR.search(stdout) if "JUDGE ERROR:" in stdout else None
    if judge is None:
        return printed
    if authorship.explains_phrase(Phrase.JUDGE_ERROR):
        return replace(printed, doubts=_shorten_lines([judge[0], *printed.doubts]))
    return replace(printed, judge_error=judge["detail"].strip()[:CHECK_CHARS])


def _read_apps(
    stdout: str, lines: Sequence[re.Match[str]], authorship: Authorship
) -> PrintedResults:
    apps = {line["name"]: line["passed"] == "1" for line in lines}
    if doubts := [*_forged_apps(lines, authorship), *_hidden_apps(stdout, authorship)]:
        return PrintedResults(doubts=_shorten_lines(doubts))
    if len(apps) > _APPS_JUDGED:
        return PrintedResults()
    return PrintedResults(
        None, _app_names(apps, passed=True), _app_names(apps, passed=False), countable=True
    )


def _forged_apps(lines: Sequence[re.Match[str]], authorship: Authorship) -> Iterator[str]:
    for line in [*{line[0]: line for line in lines}.values()][:_APPS_JUDGED]:
        name = line["name"].removeprefix("App ")
        if authorship.explains_app(line[0], name, line["passed"]):
            yield line[0]


def _hidden_apps(stdout: str, authorship: Authorship) -> Iterator[str]:
    """Yield results that go unrecognized because of the text before or after them, where the
    policy may have written that text."""
    lines = dict.fromkeys(line for line in stdout.split("\n") if "App " in line)
    inside = [(line, span) for line in lines if not _APP.match(line) for span in _first_app(line)]
    for line, (start, end) in inside:
        too_many = len(inside) > _APPS_JUDGED
        if too_many or authorship.explains_frame(line[:start], line[end:]):
            yield line


def _first_app(line: str) -> Iterator[tuple[int, int]]:
    return islice(app_spans(line, _APP_START, _APP_VALUE), 1)


def _read_lists(stdout: str, authorship: Authorship) -> PrintedResults:
    found = dict(_find_accumulators(stdout))
    forged = [kind for kind in found if authorship.explains_phrase(_PHRASES[kind])]
    if forged:
        return PrintedResults(
            doubts=_shorten_lines(f"{kind}_ACCUMULATOR: {found[kind]}" for kind in forged)
        )
    lists = {kind: _parse_checks(body) for kind, body in found.items()}
    checks = {kind: listed for kind, (listed, _) in lists.items()}
    if parted := [kind for kind in checks if authorship.explains_parting(checks[kind])]:
        return PrintedResults(
            doubts=_shorten_lines(f"{kind}_ACCUMULATOR: {found[kind]}" for kind in parted)
        )
    countable = all(is_list for _, is_list in lists.values())
    return PrintedResults(None, checks.get("SUCCESS", ()), checks.get("ERROR", ()), countable)


def _find_accumulators(stdout: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each accumulator. It takes one pass: a pattern for the whole would
    rescan the rest for each that is never closed."""
    at = 0
    unclosed: set[str] = set()
    while len(unclosed) < 2 and (opened := _OPENED.search(stdout, at)) is not None:
        at, kind = opened.end(), opened["kind"]
        closing = f"\n<<< {kind}_ACCUMULATOR <<<"
        end = -1 if kind in unclosed else stdout.find(closing, at)
        if end < 0:
            unclosed.add(kind)
        else:
            yield kind, stdout[at:end]
            at = end + len(closing)


def _parse_checks(body: str) -> tuple[tuple[str, ...], bool]:
    """Return the checks, and True if they were printed as a list. In any other text, one line
    by the policy would itself be a check."""
    try:
        value = parse_literal(body.strip(), _LIST_LIMITS)
        if isinstance(value, list | tuple):
            return bounded_checks(cast("Sequence[object]", value)), True
        return bounded_checks([value]), False
    except ValueError:
        # Not a literal, or one with an integer that Python does not write out.
        return bounded_checks(body.splitlines()), False


def _app_names(apps: Mapping[str, bool], *, passed: bool) -> tuple[str, ...]:
    names = [name[:CHECK_CHARS] for name, value in apps.items() if value is passed]
    return tuple(names[:CHECKS_KEPT])


def _shorten_lines(lines: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:_DOUBT_CHARS] for line in lines)[:_DOUBTS_KEPT]
