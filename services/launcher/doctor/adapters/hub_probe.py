"""Download of a model's small files from the Hugging Face hub: all but its weights."""

import json
import sys

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from services.common.printable_text import say

# Exit codes: the hub cannot be asked; it says that there is no such model for us.
UNKNOWN, REFUSED = 1, 2
_FILES = ("config.json", "*.index.json", "tokenizer.json", "tokenizer_config.json", "*.jinja")


def main() -> int:
    question = json.load(sys.stdin)
    try:
        folder = snapshot_download(
            question["model"], revision=question["revision"], allow_patterns=list(_FILES)
        )
    # The hub's client raises its own errors, httpx's and OSErrors; the name of each says enough.
    except Exception as error:  # noqa: BLE001
        say(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return REFUSED if isinstance(error, HfHubHTTPError | HFValidationError) else UNKNOWN
    say(str(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
