"""Texts of tokens by the policy's own tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as HubTokenizer
from tokenizers.decoders import DecodeStream

from flotilla_common.adapters.token_text import TOKENIZER_FILE, NoTokenizerError, load_tokenizer
from flotilla_reading.inspector.queries.episodes import RunTokenizer
from flotilla_reading.inspector.queries.run_folders import read_object


def load_run_tokenizer(run_dir: Path, policy: Path | None = None) -> RunTokenizer:
    """Load the tokenizer of a run's policy; without it, tokens are shown as numbers.

    It is read from `policy` if given, else from the model in `spec.json`, or the run's own."""
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
    # Exported by a complete run, and included in its copies.
    if (run_dir / "model" / TOKENIZER_FILE).exists():
        yield str(run_dir / "model"), None


def _with_texts(library: HubTokenizer) -> RunTokenizer:
    return RunTokenizer(
        decode=lambda ids: library.decode(list(ids), skip_special_tokens=False),
        texts_of=lambda ids: list(_stream_texts(library, ids)),
    )


def _stream_texts(library: HubTokenizer, token_ids: Sequence[int]) -> Iterator[str]:
    """Yield the text that each token adds to the previous ones."""
    size = library.get_vocab_size()
    stream = DecodeStream(skip_special_tokens=False)
    for token_id in token_ids:
        # Ids in the model's padding have no text.
        known = 0 <= token_id < size
        yield (stream.step(library, token_id) or "") if known else f"[{token_id}]"


def _numbers(problem: str) -> RunTokenizer:
    def show_ids(token_ids: Sequence[int]) -> list[str]:
        return [f"[{token_id}]" for token_id in token_ids]

    return RunTokenizer(lambda ids: "".join(show_ids(ids)), show_ids, problem)
