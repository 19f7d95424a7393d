"""Refusals of the desk; the name tells what the client can do about it."""


class DeskError(Exception):
    """A refusal. The message goes to the client."""


class BadOrder(DeskError):
    """The order can never be carried out as it is."""


class NotFound(DeskError):
    """There is no such thing, or it is another tenant's."""


class Conflict(DeskError):
    """Another order has the same number."""


class GoneError(DeskError):
    """It existed and has ended, or its result was dropped."""


class TooMuch(DeskError):
    """Too much is ordered already: try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLarge(DeskError):
    """One order is larger than any may be."""


class Away(DeskError):
    """Trainer or engine has not been reached yet, or the disk refuses: try again."""
