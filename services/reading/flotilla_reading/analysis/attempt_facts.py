"""Facts of an attempt that rules judge, read from its row (docs/dumps.md, "A row").

    facts = read_facts(json.loads(line))
    facts.open_errors        # the kinds of errors that the policy never got past

Texts come from a policy and from environments: they are matched here, never trusted."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from flotilla_common.domain.attempts import StopReason, ToolOutcome
from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.text.parsing import ParseError, TextLimits, parse_json

Row = Mapping[str, Any]


class ErrorKind(StrEnum):
    """What a tool's answer complains about."""

    NO_ANSWER = "no_answer"
    SERVER = "server"
    AUTHORIZATION = "authorization"
    ARGUMENTS = "arguments"
    NOT_FOUND = "not_found"
    OTHER = "other"


# By outcome, before any text is read.
_BY_OUTCOME = {
    ToolOutcome.DEADLINE: ErrorKind.NO_ANSWER,
    ToolOutcome.OUTCOME_UNKNOWN: ErrorKind.NO_ANSWER,
    ToolOutcome.SESSION_LOST: ErrorKind.NO_ANSWER,
    ToolOutcome.BAD_TOOL: ErrorKind.ARGUMENTS,
    ToolOutcome.BAD_ARGUMENTS: ErrorKind.ARGUMENTS,
}


def _status(codes: str) -> str:
    """Return a pattern of an HTTP status, which an id may look like."""
    return rf"(?:^|\b(?:http|status|code|error))\W{{0,8}}(?:{codes})\b"


# In this order: "permission to see user 4: not found" is an authorization error, and an argument
# that is "not a valid id" one of arguments.
_PATTERNS = (
    (
        ErrorKind.NO_ANSWER,
        r"time[ds]?[ -]?out|no answer|no response|unreachable|connection (refused|reset|error|lost)"
        r"|unavailable|deadline|" + _status("50[34]"),
    ),
    (
        ErrorKind.SERVER,
        r"internal (server )?error|traceback|bad gateway|database is locked|server error"
        r"|(operational|programming|runtime|key|attribute)error|unhandled exception|"
        + _status("50[02]"),
    ),
    (
        ErrorKind.AUTHORIZATION,
        r"un-?authori[sz]ed|not authori[sz]ed|forbidden|permission|access (was |is )?denied"
        r"|not allowed|privilege|insufficient.(scope|rights|role)|not logged in|sign in"
        r"|log(ged)? ?in (is )?(first|required)"
        r"|authenticat|credential|(invalid|expired|missing) (api |access )?(token|key|session)"
        r"|only (the )?(owner|admin)|" + _status("40[13]"),
    ),
    (
        ErrorKind.ARGUMENTS,
        r"argument|parameter|required|must be|expected|invalid|not valid|not a valid|validation"
        r"|malformed|not of type|unknown (tool|field|property)|additional propert|out of range"
        r"|cannot be (empty|null|blank|parsed)|not json|bad request|unsupported"
        r"|(tool|function|method) .{0,60}(not found|does not exist)|" + _status("400|422"),
    ),
    (
        ErrorKind.NOT_FOUND,
        r"not found|no such|(does not|doesn't|do not) exist|no match|no results?\b"
        r"|(could|can)(not|n't| not) (be )?f(ind|ound)|unknown|no [\w ]{1,40} found|nothing found|"
        + _status("404"),
    ),
)
_BY_TEXT = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
# The policy's words. "Cannot" counts in the first person only: a quoted answer may hold one too.
# After English, the same in German, French, Spanish, Portuguese, Italian, Polish, Russian, Chinese
# and Japanese.
_GIVES_UP = re.compile(
    r"\b(I|we)('m| am|'re| are)? ?(cannot|can't|can not|could not|couldn't|unable|not able|give up"
    r"|was unable|was not able|wasn't able|were unable|don't have|do not have|have no (way|access))"
    r"|\bunable to\b|\bunfortunately\b|\b(sorry|apologi[sz]e)\b|\bimpossible\b|\bnot possible\b"
    r"|\b(please|could you|can you) (provide|confirm|clarify|share|specify|tell|check|contact|try)"
    r"|\b(would|do) you (like|want|prefer)\b|\bgiv(e|ing) up\b"
    r"|\b(leider|kann (ich )?nicht|konnte nicht|désolée?|malheureusement|ne (peux|puis) pas"
    r"|lo siento|no (puedo|pude)|desculpe|lamento|não (posso|consigo)|mi dispiace|purtroppo"
    r"|non (posso|riesco|ho)|niestety|przepraszam|nie mogę|к сожалению|не могу|не удалось)\b"
    r"|抱歉|对不起|无法|不能|申し訳|できません",
    re.IGNORECASE,
)
# A question is the user's to answer.
_ASKS = ("?", "\uff1f")
_CLAIMS = re.compile(
    r"\b(done|completed?|success(ful|fully)?|finished|all set|taken care of|as requested)\b"
    r"|\b((has|have) been|was|were|is|are)( now| all| already| just)*"
    r" (?!needed|required|expected|allowed|supposed|failed)(\w+ed|sent|made|set|paid|taken)\b"
    r"|^\W*((ok|okay|yes|great|sure)\W+)?(?!tried|attempted|looked|searched|checked|failed|need)"
    r"(\w+ed|sent|made|set|put|paid|bought)\b"
    r"|\b(I|we)('ve| have)?( now| just| successfully)*"
    r" (?!tried|attempted|looked|searched|checked|failed|need)"
    r"(\w+ed|sent|made|set|put|paid|bought)\b"
    r"|\b(erledigt|fertig|erfolgreich|wurden?|(c'est|est|a été) (fait|bien)|a été|terminée?|listo"
    r"|hecho|ha sido|éxito|pronto|feito|foi|sucesso|fatto|è stat[oa]|gotowe|zrobione|został[ao]?"
    r"|готово|выполнен\w*|успешно)\b|已|完成|成功|しました",
    re.IGNORECASE,
)
_DENIES = re.compile(
    r"\b(no|not|nothing|nobody|none|never|nicht|kein\w*|pas|non|não|nie|не)\b|n't\b|没|未",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"[.!?\n\u3002\uff01\uff1f]+")
_DONE_MARK = re.compile(r"</?done>|\[done\]", re.IGNORECASE)
_ERROR_START = re.compile(r"^\W*(tool )?error\b", re.IGNORECASE)
_NOTHING = re.compile(r"^\W*(no|zero|0) [\w ]{0,40}(results?|match(es)?|found)\b", re.IGNORECASE)
_LIMITS = TextLimits(bytes=2**20, values=2**16)
# How the dialect `full` introduces an answer.
_RESULT = "Tool result:\n"
# The name of a call that could not be read (flotilla_rollout/dialects/tool_reply_text.py).
_MALFORMED = "malformed_call"
# Characters of an error, or of the policy's words, that are read: the last ones of its words.
_MOST_READ = 4_000


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call with its answer. `error` is the answer's kind of error; None if it went well, or was
    never given."""

    name: str
    arguments: str
    answer: str = ""
    error: ErrorKind | None = None
    answered: bool = False


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """An attempt as rules see it. `last_words` is what the policy wrote last, without calls and
    thinking. `open_errors` are the kinds of errors that it never got past."""

    row: Row
    calls: tuple[MadeCall, ...]
    last_words: str
    open_errors: frozenset[ErrorKind]

    @property
    def reward(self) -> float | None:
        return self.row["reward"]

    @property
    def passed(self) -> bool:
        """True for a pass; what a judge's score says is known of its group only."""
        judged = self.row.get("judged", False)
        return not judged and self.reward is not None and self.reward >= PASS_REWARD

    @property
    def failure(self) -> str:
        """Reason why it does not count; "" if it does."""
        return self.row["failure"] or ""

    @property
    def stop_reason(self) -> str:
        """Reason for its end; "" if it has no grade."""
        return "" if self.reward is None else self.row["stop_reason"]

    @property
    def said_done(self) -> bool:
        return self.stop_reason == StopReason.DONE

    @property
    def had_tools(self) -> bool:
        return bool(self.row["counts"]["tools"] or self.calls)

    @property
    def gives_up(self) -> bool:
        """Whether the last words say that it cannot, or ask the user instead."""
        # "Anything else?" follows a claim.
        asks = self.last_words.endswith(_ASKS) and not self.claims_success
        return asks or bool(_GIVES_UP.search(self.last_words))

    @property
    def claims_success(self) -> bool:
        """Whether a sentence of the last words says that something is done."""
        said = _SENTENCES.split(self.last_words)
        return any(_CLAIMS.search(each) and not _DENIES.search(each) for each in said)


def read_facts(row: Row) -> AttemptFacts:
    """Read the facts of a row; those of an ungraded attempt have no messages."""
    messages: Sequence[Row] = [each for each in row["messages"] if not each.get("by_template")]
    said = [each["content"] for each in messages if each["role"] == "assistant"]
    calls = tuple(_read_calls(messages))
    words = _DONE_MARK.sub("", said[-1][-_MOST_READ:]).strip() if said else ""
    return AttemptFacts(row, calls, words, frozenset(_open_errors(row, calls)))


def _read_calls(messages: Sequence[Row]) -> Iterator[MadeCall]:
    """Yield the calls in the order of their answers; those without an answer follow their turn, and
    a malformed one has no arguments."""
    waiting = dict[str, MadeCall]()
    for message in messages:
        if message["role"] == "assistant":
            yield from waiting.values()
            calls = message.get("tool_calls", ())
            waiting = {call["id"]: _made_call(call["function"]) for call in calls}
        # One without a name answers a turn without a call.
        elif message["role"] == "tool" and message["name"]:
            text = message["content"]
            made = waiting.pop(message["tool_call_id"], MadeCall(message["name"], ""))
            error = find_error(text, message.get("outcome", ToolOutcome.OK))
            yield replace(made, answer=text, error=error, answered=True)
    yield from waiting.values()


def _made_call(function: Row) -> MadeCall:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)
    return MadeCall(function["name"], text)


def find_error(answer: str, outcome: str = ToolOutcome.OK) -> ErrorKind | None:
    """Return the kind of error that a tool's answer tells; None if it tells none.

    An empty list is an error too: what was searched for was not found."""
    if outcome in _BY_OUTCOME:
        return _BY_OUTCOME[ToolOutcome(outcome)]
    text, is_empty = _read_error(answer.removeprefix(_RESULT))
    if outcome != ToolOutcome.OK:
        text = text or answer or outcome
    if text:
        return kind_of_error(text)
    return ErrorKind.NOT_FOUND if is_empty else None


def kind_of_error(text: str) -> ErrorKind:
    """Return the kind of an error by its text."""
    text = text[:_MOST_READ]
    return next((kind for kind, words in _BY_TEXT if words.search(text)), ErrorKind.OTHER)


def _read_error(answer: str) -> tuple[str, bool]:
    """Return an answer's error, "" for none, and whether it is an empty list."""
    try:
        value = parse_json(answer, _LIMITS)
    except ParseError:
        return answer if _ERROR_START.match(answer) else "", bool(_NOTHING.match(answer))
    if not isinstance(value, dict):
        return "", value == []
    fields = cast("dict[str, Any]", value)
    if error := fields.get("error") or fields.get("errors"):
        return error if isinstance(error, str) else json.dumps(error), False
    if False in (fields.get("success"), fields.get("ok")) or fields.get("isError") is True:
        return answer, False
    return "", [] in fields.values() and not any(fields.values())


def _open_errors(row: Row, calls: Sequence[MadeCall]) -> Iterator[ErrorKind]:
    """Yield the error of each tool whose last call failed.

    A call that is of no tool is got past with any later call that goes well."""
    answered = [call for call in calls if call.answered]
    good = max((place for place, call in enumerate(answered) if not call.error), default=-1)
    no_tools = {*row["counts"]["unknown_tools"], _MALFORMED}
    last = {call.name: place for place, call in enumerate(answered)}
    for name, place in last.items():
        error = answered[place].error
        if error and (name not in no_tools or place > good):
            yield error
