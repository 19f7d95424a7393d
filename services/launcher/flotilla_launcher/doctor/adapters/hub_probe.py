"""Queries to the Hugging Face hub about a model: its small files, or the size of a download."""

import json
import sys
from dataclasses import asdict

from flotilla_common.adapters.model_hub import (
    ModelUnavailableError,
    check_access,
    fetch_files,
    look_up_model,
)
from flotilla_common.text.printable_text import print_json, print_visible

# Exit codes: the hub does not answer; it has no such model for this user.
UNKNOWN, REFUSED = 1, 2
_FILES = (
    *("config.json", "generation_config.json", "*.index.json"),
    *("preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "*.jinja"),
)


def main() -> int:
    question = json.load(sys.stdin)
    model, revision = question["model"], question["revision"]
    try:
        if question.get("look_up"):
            check_access(model)
            print_json(asdict(look_up_model(model, revision)))
        else:
            print_visible(str(fetch_files(model, revision, _FILES)))
    except ModelUnavailableError as error:
        print_visible(str(error), file=sys.stderr)
        return REFUSED if error.refused else UNKNOWN
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
