"""Tools' answers that are too long for the policy: cut by tokens, with a mark, and kept whole for
people."""

import hashlib

from flotilla_common.domain.trajectory import Media
from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.turns import Reply
from flotilla_rollout.episodes.attempt_limits import AttemptLimits
from flotilla_rollout.tokenizer_port import Tokenizer

_MIME = "text/plain;charset=utf-8"


def keep_whole(text: str, token_offset: int, room: int) -> Media:
    """Return an answer as media, with its content if that has at most `room` bytes."""
    content = text.encode(errors="replace")
    return Media(
        hashlib.sha256(content).hexdigest(),
        _MIME,
        token_offset=token_offset,
        size_bytes=len(content),
        content=content if len(content) <= room else b"",
    )


class ObservationCutter:
    """Cutter of the texts of replies to `limits.observation_tokens` each; the mark comes on top,
    and so do pictures, which are never cut."""

    def __init__(self, tokenizer: Tokenizer, limits: AttemptLimits) -> None:
        self._tokenizer = tokenizer
        self._most = limits.observation_tokens
        self._side = limits.observation_side
        self._inert = InertText(tokenizer.structure_tokens)

    def cut_reply(self, reply: Reply) -> Reply:
        """Return the reply as shown to the policy. Raises TemplateError."""
        # No token is shorter than a byte.
        if self._most is None or len(reply.text.encode(errors="surrogatepass")) <= self._most:
            return reply
        # A control token is one token, but many once it is broken up for the policy.
        text = self._inert.clean_text(reply.text)
        starts = self._tokenizer.token_starts(text)
        if len(starts) <= self._most:
            return reply
        shown = self._cut_text(text, starts, self._most)
        return Reply(reply.item, reply.outcome, [shown, *reply.pictures])

    def _cut_text(self, text: str, starts: list[int], most: int) -> str:
        tail = {"head": most, "tail": 0, "middle": most // 2}[self._side]
        head = most - tail
        lines = [
            text[: starts[head]],
            f"[... {len(starts) - most:,} tokens left out ...]",
            text[starts[-tail] :] if tail else "",
        ]
        return "\n".join(line for line in lines if line)
