"""The one error of this room."""


class WireError(ValueError):
    """A body is not what the protocol allows, or asks for what this server does not offer; the
    message names the field and, where there is one, the fix."""
