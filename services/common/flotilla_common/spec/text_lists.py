"""Lists of names in a spec, which command lines and forms write as one text with commas."""

from typing import Annotated, Any

from pydantic import BeforeValidator


def split_list(value: Any) -> Any:
    """Return a comma-separated text, or a list, as a tuple; anything else as it is."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


TextList = Annotated[tuple[str, ...], BeforeValidator(split_list)]
