"""Child process that renders chat templates, a line of JSON for each, under its own limits.

A template is a program by the model's makers. It may compute for hours or build a string of
terabytes, and no thread of the parent process could stop it.
"""

import json
import resource
import signal
from collections.abc import Callable
from typing import Any

from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.process.private_process import keep_private

CPU_S = 2.0
MEMORY_BYTES = 2**31
MOST_CHARACTERS = 2**24
_MAX_ERROR_CHARACTERS = 2000


def main() -> None:
    keep_private()
    parent = ParentChannel()
    # The time of the imports does not count.
    render = _load_renderer()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in parent.read_lines():
        # Its default action ends this process, even inside a loop.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = json.dumps(_answer_request(render, json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        parent.write(answer.encode() + b"\n")


class _NotRendered(Exception):
    """The template failed; the message is its own."""


def _load_renderer() -> Callable[..., Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _answer_request(render: Callable[..., Any], request: dict[str, Any]) -> dict[str, str]:
    try:
        text = _render_template(render, request)
    except _NotRendered as error:
        return {"error": str(error)}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it makes {len(text)} characters, more than {MOST_CHARACTERS}"}
    return {"text": text}


def _render_template(render: Callable[..., Any], request: dict[str, Any]) -> str:
    try:
        texts, _ = render(**request)
    except Exception as error:
        # A template may raise any error.
        reason = str(error)[:_MAX_ERROR_CHARACTERS]
        raise _NotRendered(reason or type(error).__name__) from error
    return texts[0]


if __name__ == "__main__":
    main()
