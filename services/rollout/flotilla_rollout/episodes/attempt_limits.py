"""Limits of one attempt, and the budgets that remain. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flotilla_common.domain.attempts import StopReason

if TYPE_CHECKING:
    from flotilla_common.domain.trajectory import Counts

Side = Literal["head", "tail", "middle"]


@dataclass(frozen=True, slots=True)
class TurnBudget:
    """Tokens that a request may sample, and the end of an attempt that needed more.

    If `continues`, a cut turn continues in another request."""

    tokens: int
    reason: StopReason
    continues: bool = False


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Limits of one attempt; lengths in tokens, times in seconds, None for no limit.

    `max_input_length` is checked before each turn against everything so far;
    `max_generate_length` bounds each request, and with it each turn unless `continue_turns`;
    `turn_tokens` bounds a turn of any number of requests.
    Longer answers of tools lose the `observation_side`. `max_images` bounds the pictures of the
    conversation.
    """

    max_turns: int
    max_input_length: int
    max_generate_length: int
    max_model_len: int
    attempt_timeout_s: float
    call_timeout_s: float
    grade_timeout_s: float
    turn_tokens: int | None = None
    sampled_tokens: int | None = None
    calls: int | None = None
    thinking_tokens: int | None = None
    parse_errors: int | None = None
    observation_tokens: int | None = None
    observation_side: Side = "middle"
    continue_turns: bool = False
    max_images: int = 0

    def turn_budget(self, tokens: int, sampled: int, written: int = 0) -> TurnBudget:
        """Return the budget of the next request after `tokens`, of which `sampled` were sampled and
        `written` belong to the turn that it continues."""
        piece = self.max_generate_length - (0 if self.continue_turns else written)
        bounds = [
            TurnBudget(piece, StopReason.GENERATION_LENGTH, continues=self.continue_turns),
            TurnBudget(self.max_model_len - tokens, StopReason.CONTEXT_OVERFLOW),
        ]
        if self.turn_tokens is not None:
            left = self.turn_tokens - written
            bounds.append(TurnBudget(left, StopReason.GENERATION_LENGTH))
        if self.sampled_tokens is not None:
            left = self.sampled_tokens - sampled
            bounds.append(TurnBudget(left, StopReason.MAX_SAMPLED_TOKENS))
        return min(bounds, key=lambda bound: bound.tokens)

    def refuses_turn(self, tokens: int, sampled: int) -> StopReason | None:
        """Return why no further turn begins after `tokens`; None if one does."""
        if tokens > self.max_input_length:
            return StopReason.CONTEXT_OVERFLOW
        budget = self.turn_budget(tokens, sampled)
        return budget.reason if budget.tokens < 1 else None

    def ends_attempt(self, counts: "Counts", sampled: int) -> StopReason | None:
        """Return why no turn follows the played one; None if one does."""
        if self.sampled_tokens is not None and sampled >= self.sampled_tokens:
            return StopReason.MAX_SAMPLED_TOKENS
        return StopReason.MAX_TURNS if counts.turns >= self.max_turns else None
