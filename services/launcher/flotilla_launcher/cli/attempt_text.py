"""One attempt as text: a head, its turns, and the verifier's checks. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from flotilla_common.domain.messages import TokenText
from flotilla_common.domain.token_authors import TURN_AUTHORS
from flotilla_common.episodes.episode_text import write_pictures_once

Decode = Callable[[Sequence[int]], str]
Attempt = dict[str, Any]

_MARGIN = 13
_STYLES = {"assistant": "cyan", "tool": "yellow"}


def draw_attempt(attempt: Attempt, decode: Decode, *, whole: bool = False) -> Text:
    """Render the attempt, followed by an empty line. With `whole`, include the full tool results
    that were truncated for the policy."""
    text = Text()
    verdict, style = _format_verdict(attempt)
    text.append(f"{verdict}  ", style=f"bold {style}")
    text.append(f"{_format_title(attempt)}\n", style="bold")
    for label, value in _list_facts(attempt):
        _append_field(text, label, value, "")
    if not attempt["tokens_kept"]:
        _append_field(
            text, "tokens", "pruned with a checkpoint; each step's first group is kept", "dim"
        )
    pairs = zip(attempt["sequences"], attempt["messages"], strict=True)
    for number, (sequence, messages) in enumerate(pairs):
        if len(attempt["sequences"]) > 1:
            _append_field(text, "sequence", str(number), "bold")
        _append_turns(text, sequence, messages, attempt["turns"], _Shown(sequence, decode, whole))
    _append_checks(text, attempt)
    return text


def _format_verdict(attempt: Attempt) -> tuple[str, str]:
    reward = attempt["reward"]
    if attempt["judged"] and not attempt["failure"]:
        return ("TO BE JUDGED" if reward is None else "JUDGED"), "cyan"
    if reward is None:
        return "NO REWARD", "magenta"
    return ("PASS", "green") if reward >= 1.0 else ("FAIL", "red")


def _format_title(attempt: Attempt) -> str:
    where = attempt["eval_id"] or ("no step yet" if attempt["step"] is None else "")
    where = where or f"step {attempt['step']}"
    tries = f", try {attempt['try']}" if attempt["try"] else ""
    index = attempt["attempt_index"]
    return f"{where}  {attempt['group_id']} attempt {index}{tries}  {attempt['task_key']}"


def _list_facts(attempt: Attempt) -> Iterator[tuple[str, str]]:
    counts = attempt["counts"]
    yield "task", attempt["task_prompt"]
    reward = "not known" if attempt["reward"] is None else f"{attempt['reward']:g}"
    partial = attempt["partial_reward"]
    ended = [f"reward {reward}", *(["judged"] if attempt["judged"] else [])]
    ended += [] if partial is None else [f"partial {partial:g}"]
    ended += [f"{name} {value:g}" for name, value in attempt["named_rewards"].items()]
    ended.append(f"stop reason {attempt['failure'] or attempt['stop_reason']}")
    yield "outcome", ", ".join(ended)
    unusual = [attempt["no_grade"], attempt["detail"], attempt["dropped"]]
    for label, value in zip(("no grade", "detail", "not trained"), unusual, strict=True):
        if value:
            yield label, value
    if attempt["sequences"]:
        yield "policy", _format_policies(attempt)
    counted = [f"{counts['turns']} turns", f"{counts['tool_calls']} calls"]
    counted += [f"{count} {name}" for name, count in counts["tool_errors"].items()]
    counted += [f"{counts[key]} {key}" for key in ("parse_errors", "repeats") if counts[key]]
    times = f"open {counts['open_s']:.2f} s, grade {counts['grade_s']:.2f} s"
    yield "episode", f"{', '.join(counted)}; {times}; worker {attempt['worker_id']}"


def _format_policies(attempt: Attempt) -> str:
    spans = [span for sequence in attempt["sequences"] for span in sequence if "policy" in span]
    versions = dict.fromkeys(span["policy"] for span in spans)
    temperatures = dict.fromkeys(f"{span['temperature']:g}" for span in spans)
    return f"{', '.join(versions)} (run epoch:version), temperature {', '.join(temperatures)}"


class _Shown:
    """Texts of a sequence, and its media by their hashes: pictures, and the whole of texts that the
    policy saw in part."""

    def __init__(self, sequence: Sequence[Any], decode: Decode, whole: bool) -> None:
        self.ids = [token for span in sequence for token in span["token_ids"]]
        self.whole = whole
        media = [item for span in sequence for item in span.get("media", ())]
        self.media = {item["sha256"]: item for item in media}
        pads = {self.ids[item["token_offset"]] for item in media if "picture" in item}
        self.decode = write_pictures_once(decode, pads)

    def text_of(self, text: str | Sequence[int]) -> str:
        """Return a message's text, which may be the range of its tokens."""
        return text if isinstance(text, str) else TokenText(*text).read(self.ids, self.decode)


def _append_turns(
    text: Text,
    sequence: Sequence[Any],
    messages: Sequence[Any],
    timings: Sequence[Any],
    shown: _Shown,
) -> None:
    turn, end, left = 0, 0, list(messages)
    for is_turn, spans in groupby(sequence, key=lambda span: span["author"] in TURN_AUTHORS):
        parts = list(spans)
        end += sum(len(part["token_ids"]) for part in parts)
        if is_turn:
            turn += 1
            _append_field(
                text, f"turn {turn}", _format_turn(parts, timings[turn - 1 : turn]), "dim"
            )
        while left and left[0]["end"] <= end:
            _append_message(text, left.pop(0), shown)


def _append_message(text: Text, message: Mapping[str, Any], shown: _Shown) -> None:
    role, style = message["role"], _STYLES.get(message["role"], "dim")
    if thinking := message.get("thinking"):
        _append_field(text, "thinking", shown.text_of(thinking), style)
    content, outcome = shown.text_of(message.get("content", "")), message.get("outcome", "")
    if outcome not in ("", "ok"):
        content = f"{outcome}: {content}"
    if content or role != "assistant":
        _append_field(text, role, content, style)
    for call in message.get("calls", ()):
        _append_field(text, "call", f"{call['name']} {call['arguments']}", style)
    for item in filter(None, map(shown.media.get, message.get("media", ()))):
        if "picture" in item:
            what = f"{item['picture']}, {item['bytes']:,} bytes, SHA-256 {item['sha256'][:12]}"
            _append_field(text, "picture", what, "dim")
        else:
            _append_field(text, "whole answer", _format_answer(item, shown.whole), "dim")


def _format_answer(answer: Mapping[str, Any], whole: bool) -> str:
    """Format an answer that was cut for the policy."""
    if answer["text"] is not None and whole:
        return answer["text"]
    kept = "not kept" if answer["text"] is None else "shown with --whole"
    return f"{answer['bytes']:,} bytes, {kept}"


def _append_checks(text: Text, attempt: Attempt) -> None:
    for check in attempt["checks_passed"]:
        _append_field(text, "passed", check, "green")
    for check in attempt["checks_failed"]:
        _append_field(text, "failed", check, "red")
    if attempt["suspicion"]:
        # Printed by the verifier as a result; the policy may have written it.
        _append_field(text, "suspect", attempt["suspicion"], "magenta")


def _format_turn(parts: Sequence[Any], timing: Sequence[Any]) -> str:
    forced = sum(len(part["token_ids"]) for part in parts if part["author"] == "forced")
    parts = [part for part in parts if part["author"] == "policy"]
    count = sum(len(part["token_ids"]) for part in parts)
    total = sum(part["mean_logprob"] * len(part["token_ids"]) for part in parts)
    policies = dict.fromkeys(part["policy"] for part in parts)
    facts = [f"policy {'+'.join(policies)}", f"{count} tokens"]
    facts.append(f"mean logprob {total / max(count, 1):.3f}")
    if forced:
        facts.append(f"{forced} forced tokens")
    for times in timing:
        if thought := times["thinking_tokens"]:
            acted = times["generated_tokens"] - thought
            facts.append(f"thinking {thought} tokens, acting {acted}")
        facts.append(f"generate {times['generate_s']:.2f} s, tools {times['tools_s']:.2f} s")
        if times["reward"] is not None:
            facts.append(f"reward of the step {times['reward']:g}")
    return ", ".join(facts)


def _append_field(text: Text, label: str, value: str, style: str) -> None:
    """Append a label in the margin and the value beside it, line under line."""
    indent = "\n" + " " * (_MARGIN + 2)
    text.append(f"  {label:{_MARGIN}}", style="dim")
    text.append(f"{indent.join(value.splitlines())}\n", style=style)
