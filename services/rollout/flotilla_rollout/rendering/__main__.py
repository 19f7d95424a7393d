"""Render conversations to a file of demonstrations. Standard input has JSON lines of
flotilla_common/episodes/conversations.py. Prints one JSON object: what the file says of itself, or
the `error`."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flotilla_common.adapters.hidden_torch import hide_torch
from flotilla_common.adapters.model_hub import fetch_files
from flotilla_common.episodes.conversations import (
    Conversation,
    RenderEnd,
    RenderLine,
    RenderSettings,
)
from flotilla_common.episodes.demonstrations import (
    Demonstration,
    DemonstrationHead,
    write_demonstrations,
)
from flotilla_common.process.private_process import keep_private
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry import log
from flotilla_common.text.printable_text import print_json
from flotilla_common.weights.fingerprint import tokenizer_digest
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.rendering.conversation_renderer import (
    ConversationRenderer,
    NotRenderedError,
)

if TYPE_CHECKING:
    from flotilla_rollout.adapters.model_files import ModelFiles

_MOST_NAMED = 1_000


@dataclass(slots=True)
class RenderedFile:
    """Demonstrations of conversations, and what became of each."""

    renderer: ConversationRenderer
    sequences: list[Demonstration] = field(default_factory=list[Demonstration])
    counts: Counter[str] = field(default_factory=Counter[str])
    left_out: list[str] = field(default_factory=list[str])

    def add(self, conversation: Conversation) -> None:
        """Render a conversation; what is not trained is counted, and named with the reason."""
        group, attempt, number = conversation.key
        place = f"{group}/{attempt}/{number}" if attempt or number else group
        try:
            rendered = self.renderer.render(conversation)
        except NotRenderedError as error:
            self.counts[error.fate] += 1
            self.left_out.append(f"{place}: {error}")
            return
        self.left_out += [f"{place}: turn {n + 1}: {why}" for n, why in rendered.faults.items()]
        trained = [each for each in rendered.sequences if each.trained.any()]
        self.counts["turns_not_read_back"] += len(rendered.faults)
        self.counts["without_trained_tokens"] += not trained
        self.counts["sequences"] += len(trained)
        self.counts["tokens"] += sum(len(each.token_ids) for each in trained)
        self.counts["trained_tokens"] += sum(int(each.trained.sum()) for each in trained)
        self.sequences += trained


def render_conversations(lines: Iterable[bytes]) -> DemonstrationHead:
    """Write the conversations of JSON lines to the file that the first line names, and return what
    the file says of itself; nothing is written if it has no sequence.

    Raises ConfigError for a model or a dialect that cannot be used, EOFError if the input breaks
    off, and OSError."""
    found = map(msgspec.json.Decoder(RenderLine).decode, lines)
    settings = next(found, None)
    assert isinstance(settings, RenderSettings)
    model = _read_model(settings)
    file = RenderedFile(ConversationRenderer(model.tokenizer, model.dialect))
    for line in found:
        if isinstance(line, Conversation):
            file.add(line)
            continue
        assert isinstance(line, RenderEnd)
        head = DemonstrationHead(
            line.source,
            tokenizer_digest(model.folder).hex(),
            line.selection,
            dict(Counter(line.counts) + file.counts),
            line.pruned,
            (*line.left_out, *file.left_out)[:_MOST_NAMED],
        )
        if file.sequences:
            write_demonstrations(Path(settings.out), head, file.sequences)
        return head
    raise EOFError("the conversations broke off")


def _read_model(settings: RenderSettings) -> "ModelFiles":
    """Fetch the files of the policy's model, except its weights, and rehearse its dialect. Raises
    ConfigError."""
    policy = parse_config(PolicyConfig, settings.policy, where="the spec", section="policy")
    dialect = parse_config(
        DialectConfig, settings.dialect, where="the spec", section="rollout.dialect"
    )
    if not (dialect.parser or policy.trust_remote_code):
        hide_torch()
    # It imports transformers, which would import torch.
    from flotilla_rollout.adapters.model_files import (
        WITHOUT_WEIGHTS,
        UnplayedError,
        read_model_folder,
    )

    folder = fetch_files(policy.model, policy.revision, WITHOUT_WEIGHTS)
    try:
        return read_model_folder(folder, policy, dialect)
    except UnplayedError as error:
        hint = "`flotilla doctor SPEC` finds settings that play it"
        raise ConfigError(f"{error}; {hint}") from error


def main() -> int:
    # To standard error, which nobody waits for.
    log.setup("rendering", "")
    try:
        head = render_conversations(sys.stdin.buffer)
    except (ConfigError, EOFError, OSError) as error:
        print_json({"error": str(error)})
        return 1
    print_json(asdict(head))
    return 0


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
