"""Why the desk refuses a call."""


class DeskError(Exception):
    """A refusal; the message is for the client."""


class BadOrder(DeskError):
    """The order cannot be carried out as it is."""


class NotFound(DeskError):
    """There is no such thing, or it is another tenant's."""


class Conflict(DeskError):
    """An order of the same place has another body."""


class GoneError(DeskError):
    """It was here, and is no longer."""


class TooMuch(DeskError):
    """A quota is used up: try again later."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLarge(DeskError):
    """The order is larger than any may be."""


class Away(DeskError):
    """The trainer or the sampler cannot be reached: try again."""
