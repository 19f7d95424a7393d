"""What an engine has used of a service that sends bills, and how long it waited for it. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServiceUse:
    """Tokens of all answered requests since the start, whatever became of their attempts, and the
    wait for a service that answers nobody. Times are in seconds, on the caller's clock."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    # What is waited for; empty while the service answers.
    reason: str = ""
    # What it was when the present wait, or the last one, began.
    first_reason: str = ""
    _since: float = 0.0
    _ended_waits_s: float = 0.0

    def note_answer(self, prompt_tokens: int, sampled_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.sampled_tokens += sampled_tokens

    def note_state(self, reason: str, now: float) -> None:
        """Note what is waited for now; nothing if the reason is empty."""
        if not self.reason:
            self.first_reason, self._since = reason, now
        elif not reason:
            self._ended_waits_s += now - self._since
        self.reason = reason

    def waiting_s(self, now: float) -> float:
        """Return the duration of the present wait; 0 if there is none."""
        return now - self._since if self.reason else 0.0

    def waited_s(self, now: float) -> float:
        """Return the duration of all waits, the present one included."""
        return self._ended_waits_s + self.waiting_s(now)

    def collect_metrics(self, now: float) -> dict[str, float]:
        return {
            "tokens/prompt_total": float(self.prompt_tokens),
            "tokens/sampled_total": float(self.sampled_tokens),
            "service/waiting_seconds": self.waiting_s(now),
            "service/waited_seconds_total": self.waited_s(now),
        }
