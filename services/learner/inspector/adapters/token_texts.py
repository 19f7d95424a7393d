"""Texts of tokens by the policy's own tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HubTokenizer
from tokenizers.decoders import DecodeStream

from services.common.adapters.token_text import TOKENIZER_FILE, NoTokenizerError, load_tokenizer
from services.learner.inspector.queries.episodes import RunTokenizer
from services.learner.inspector.queries.run_folders import read_object


def load_run_tokenizer(run_dir: Path, policy: Path | None = None) -> RunTokenizer:
    """Load the tokenizer of a run's policy; without it tokens read as their numbers.

    It is in `policy`, if given; else at the path in `spec.json`, or in the run's own model."""
    problem = ""
    for model, revision in [(str(policy), None)] if policy else _places(run_dir):
        try:
            return _with_texts(load_tokenizer(model, revision))
        except NoTokenizerError as error:
            problem = problem or str(error)
    problem = problem or "spec.json does not name the policy's model"
    return _numbers(f"{problem}; flotilla inspect --policy names a model folder that has it")


def _places(run_dir: Path) -> Iterator[tuple[str, str | None]]:
    policy = read_object(run_dir / "spec.json").get("policy")
    model = policy.get("model") if isinstance(policy, dict) else None
    if isinstance(policy, dict) and isinstance(model, str):
        revision = policy.get("revision")
        yield model, revision if isinstance(revision, str) else None
    # What a complete run has exported, and a copy of it elsewhere has of that.
    if (run_dir / "model" / TOKENIZER_FILE).exists():
        yield str(run_dir / "model"), None


def _with_texts(library: HubTokenizer) -> RunTokenizer:
    return RunTokenizer(
        decode=lambda ids: library.decode(list(ids), skip_special_tokens=False),
        tokens=_StreamedTexts(library),
    )


class _StreamedTexts:
    """Text that each token adds to the text before it. Implements `TokenTexts`."""

    def __init__(self, library: HubTokenizer) -> None:
        self._library = library

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        return list(self._stream(token_ids))

    def _stream(self, token_ids: Sequence[int]) -> Iterator[str]:
        size = self._library.get_vocab_size()
        stream = DecodeStream(skip_special_tokens=False)
        for token_id in token_ids:
            # An id of the model's padding has no text.
            known = 0 <= token_id < size
            yield (stream.step(self._library, token_id) or "") if known else f"[{token_id}]"


class _NumberedTexts:
    """Token ids in place of texts. Implements `TokenTexts`."""

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        return [f"[{token_id}]" for token_id in token_ids]


def _numbers(problem: str) -> RunTokenizer:
    texts = _NumberedTexts()
    return RunTokenizer(lambda ids: "".join(texts.texts_of(ids)), texts, problem)
