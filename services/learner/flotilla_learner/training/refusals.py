"""Refusals of the contract."""


class OperationRefused(Exception):
    """The request cannot be carried out, and nothing changed; `reason` is the contract's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
