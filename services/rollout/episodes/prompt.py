"""What the policy reads: the prompt of an episode, and what it sees after each of its turns.

Token ids that the policy sampled are never made anew. The prompt is tokenised once, and after a
turn only the chat template's own suffix is appended: the end of the turn, the observations, the
start of the next turn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from services.rollout.ports import TemplateError, Tokenizer
from services.rollout.types import PromptFacts, Tool

Profile = Literal["full", "minimal"]

CURRENT_DATE = "CURRENT_DATE"
LABELS = {"LOGGED_IN_USER": "Logged in user ID", "LOGGED_IN_NAME": "Logged in as"}
OK = "ok"
NO_CALL = (
    'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
)
# Numbers of tool messages in a row that a template must render.
CHECKED = (1, 2, 3)
FULL_INSTEAD = (
    'rollout.prompt.profile = "minimal" shows what tools answer as `tool` messages: set'
    ' rollout.prompt.profile = "full", which shows it as user messages, or give the model a'
    " chat template that renders them"
)
# Stands for a policy turn in a rendered conversation; no template changes or repeats it.
TURN = "POLICYTURN"


class PromptBuilder:
    """Builds token ids for one chat template.

    Profile "full" says everything in a system message, for models that have not seen these tools.
    Profile "minimal" is the task's prompt alone, the tools rendered by the chat template.

    Raises TemplateError when the template rewrites earlier turns, does not end a turn by a
    control token, or cannot render what tools answer.
    """

    def __init__(self, tokenizer: Tokenizer, profile: Profile) -> None:
        self._tokenizer = tokenizer
        self._profile: Profile = profile
        self._suffixes: dict[int, tuple[str, ...]] = {}
        start = self._render([], generate=True)
        self._turn_end = self._turn_end_token()
        ids = tokenizer.encode(self._turn_end)
        if len(ids) != 1:
            raise TemplateError(f"{self._turn_end!r} ends a turn but is {len(ids)} tokens, not 1")
        self.turn_end_id = ids[0]
        self._check_observations()
        # True when the template itself starts the policy's thinking: it then only closes it.
        self.opens_thinking = start.rfind("<think>") > start.rfind("</think>")

    def _check_observations(self) -> None:
        """Found later, it would be found by the attempts that come so far, and by no others."""
        try:
            for count in CHECKED if self._profile == "minimal" else (1,):
                self._suffix(count)
        except TemplateError as error:
            if self._profile == "full" or not self._renders_users():
                raise
            raise TemplateError(f"{error}; {FULL_INSTEAD}") from error

    def _renders_users(self) -> bool:
        """True when what tools answer can be shown as a user's message."""
        try:
            self._pieces("user", 1)
        except TemplateError:
            return False
        return True

    def prompt_ids(self, facts: PromptFacts, tools: Sequence[Tool]) -> list[int]:
        """The prompt of an episode, the start of the policy's first turn included."""
        user = {"role": "user", "content": self._harmless(facts.task)}
        schemas = self._schemas(tools)
        if self._profile == "minimal":
            text = self._tokenizer.apply_chat_template([user], schemas, True)
        else:
            told = self._harmless(system_text(facts, schemas))
            messages = [{"role": "system", "content": told}, user] if told else [user]
            text = self._tokenizer.apply_chat_template(messages, None, True)
        return self._tokenizer.encode(text)

    def observation_ids(self, observations: Sequence[str], *, turn_ended: bool = True) -> list[int]:
        """What follows a policy turn: its rest, the observations, the start of the next turn.

        `turn_ended` is False when the policy has not sampled its end-of-turn token itself.
        """
        texts = [self._harmless(text) for text in observations]
        if self._profile == "full":
            texts = ["\n\n".join(texts)]
        pieces = self._suffix(len(texts))
        body = "".join(piece + text for piece, text in zip(pieces, texts, strict=False))
        return self._tokenizer.encode(("" if turn_ended else self._turn_end) + body + pieces[-1])

    def observation_text(self, outcome: str, parts: Sequence[str]) -> str:
        """One tool call's answer as the policy reads it; `outcome` is "ok" or kind of error."""
        text = "\n".join(parts)
        if self._profile == "minimal":
            return text or "null" if outcome == OK else json.dumps({"error": text or outcome})
        if outcome == OK:
            return f"Tool result:\n{text or '(empty)'}"
        return f"Error: {text or outcome}"

    def no_call_text(self) -> str:
        """What the policy reads after a turn that neither calls a tool nor is done."""
        return NO_CALL if self._profile == "full" else json.dumps({"error": "no tool call found"})

    def _suffix(self, count: int) -> tuple[str, ...]:
        """The template's text around `count` observations, after the end-of-turn token."""
        if count not in self._suffixes:
            role = "tool" if self._profile == "minimal" else "user"
            self._suffixes[count] = self._pieces(role, count)
        return self._suffixes[count]

    def _pieces(self, role: str, count: int) -> tuple[str, ...]:
        marks = [f"OBSERVATION{number}X" for number in range(count)]
        tail = self._after_turn([{"role": role, "content": mark} for mark in marks])
        pieces: list[str] = []
        for mark in marks:
            piece, found, tail = tail.partition(mark)
            if not found:
                raise TemplateError(
                    f"the chat template leaves out a {role} message where {count} follow a turn"
                )
            pieces.append(piece)
        return (*pieces, tail)

    def _after_turn(self, observations: Sequence[Mapping[str, str]]) -> str:
        tail = self._render(observations, generate=True, turn=True).partition(TURN)[2]
        if not tail.startswith(self._turn_end):
            raise TemplateError(f"the chat template does not end every turn by {self._turn_end!r}")
        return tail[len(self._turn_end) :]

    def _turn_end_token(self) -> str:
        tail = self._render([], generate=False, turn=True).partition(TURN)[2]
        for token in sorted(self._tokenizer.control_tokens, key=len, reverse=True):
            if tail.startswith(token):
                return token
        raise TemplateError(
            "the chat template must end the assistant's turn by a control token of the tokenizer, "
            f"but ends it by {tail[:40]!r}"
        )

    def _render(
        self, observations: Sequence[Mapping[str, str]], *, generate: bool, turn: bool = False
    ) -> str:
        """A conversation of a question, a policy turn if asked for, and observations.

        The start is compared with the same conversation cut before the policy's turn: a template
        that rewrites what came before cannot be continued token by token.
        """
        start = [{"role": "user", "content": "QUESTION"}]
        if not turn:
            return self._tokenizer.apply_chat_template(start, None, generate)
        messages = [*start, {"role": "assistant", "content": TURN}, *observations]
        text = self._tokenizer.apply_chat_template(messages, None, generate)
        before = self._tokenizer.apply_chat_template(start, None, False)
        if not text.startswith(before) or text.count(TURN) != 1:
            raise TemplateError("the chat template rewrites or repeats earlier turns")
        return text

    def _schemas(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Tools are an environment's words too."""
        text = json.dumps([_schema(tool) for tool in tools], ensure_ascii=False)
        return json.loads(self._harmless(text))

    def _harmless(self, text: str) -> str:
        """`text` in which nothing reads as a control token: data cannot end a turn."""
        for token in self._tokenizer.control_tokens:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


def _schema(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


def system_text(facts: PromptFacts, schemas: Sequence[Mapping[str, Any]]) -> str:
    """The system message of profile "full". The date is the environment's, never the host's.

    Without tools it says what the environment knows, which may be nothing.
    """
    known = [_date_section(facts.current_date), _context_section(facts.variables)]
    if not schemas:
        return "\n\n".join(section for section in known if section)
    names = [str(schema["function"]["name"]) for schema in schemas]
    sections = [
        "You are a helpful agent. Complete the task by calling tools.",
        *known,
        "## Available Tools\n" + json.dumps(list(schemas), indent=2, ensure_ascii=False),
        "## Tool Call Format\n"
        f"Use the tools listed above by name ({', '.join(names)}):\n"
        '<tool_call>{"name": "<tool_name_from_above>", "arguments": {...}}</tool_call>\n'
        "Several calls in one response are executed in order.",
        "## Error Handling\n"
        "When a tool call fails, read the error. Do not repeat the same call with identical "
        "arguments; change your approach.",
        "## Response Format\n"
        "Every response must end with a tool call or with <done>. When the task is finished, "
        "write the final answer first, then <done>. Never answer with only a message, and never "
        "ask whether there is anything else to do.",
    ]
    return "\n\n".join(section for section in sections if section)


def _date_section(current_date: str) -> str:
    if not current_date:
        return ""
    return (
        f"## Current Date\nToday is {current_date}. When a date has no year, assume the current "
        "or a future year."
    )


def _context_section(variables: Mapping[str, str]) -> str:
    known = [f"- {label}: {variables[key]}" for key, label in LABELS.items() if key in variables]
    others = [
        f"- {key}: {value}"
        for key, value in variables.items()
        if key not in LABELS and key != CURRENT_DATE
    ]
    lines = [*known, *others]
    return "\n".join(["## Environment Context", *lines]) if lines else ""
