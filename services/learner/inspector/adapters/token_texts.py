"""Texts of tokens by the policy's own tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HubTokenizer
from tokenizers.decoders import DecodeStream

from services.common.adapters.token_text import NoTokenizerError, load_tokenizer
from services.learner.inspector.queries.episodes import RunTokenizer
from services.learner.inspector.queries.run_folders import read_object


def load_run_tokenizer(run_dir: Path) -> RunTokenizer:
    """Load the tokenizer of a run's policy; without it tokens read as their numbers."""
    policy = read_object(run_dir / "spec.json").get("policy")
    model = policy.get("model") if isinstance(policy, dict) else None
    if not isinstance(policy, dict) or not isinstance(model, str):
        return _numbers("spec.json does not name the policy's model")
    revision = policy.get("revision")
    try:
        library = load_tokenizer(model, revision if isinstance(revision, str) else None)
    except NoTokenizerError as error:
        return _numbers(str(error))
    return RunTokenizer(
        decode=lambda ids: library.decode(list(ids), skip_special_tokens=False),
        tokens=_StreamedTexts(library),
    )


class _StreamedTexts:
    """What each token adds to the text before it. Implements `TokenTexts`."""

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
