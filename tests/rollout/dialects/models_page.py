"""The page of models. `python -m tests.rollout.dialects.models_page` writes it from the table."""

from collections.abc import Iterable, Iterator, Sequence

from tests.rollout.dialects.families import FAMILIES, REFUSALS, Family
from tests.support.architectures import ARCHITECTURES, PARALLEL, TOLERANCE, Architecture
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "models.md"
_HEAD = """\
# Models

How each family of models is tried, and what is refused. The command
`python -m tests.rollout.dialects.models_page` writes this page from the table that the tests play,
`tests/rollout/dialects/families.py` and, of what is trained, `tests/support/architectures.py`.

## Played

Native calls of each family are spelled by its own published chat template, in the token ids of its
tokenizer or of one with its control tokens. Every call must be executed with exactly its arguments:
nested objects, other scripts, quotes, lines, numbers and texts that look like them, and what looks
like control tokens or ends of calls. A call in ordinary tokens, in a thinking, or cut short is
none. What tools answer must be shown as the template shows it, and the dialect must pass its
rehearsal. vLLM's own parsers read the same calls of 15 families, but for those that are traps.
Templates and tokenizers come from public packages (`make zoo`).

The last column says whether `rollout.dialect.retention = "tool_cycle"` is accepted: whether the
template shows two turns that think, call and are answered as they were played. Where it does not,
that is refused before anything is started, and `"all"`, the default, keeps every thinking.

"""
_TAIL = """
What a family refuses is read as a parse error, which the policy is told:

"""
_REFUSED = """
## Refused

These are refused before anything is started, with the message below. Where the last column says
yes, `rollout.dialect.name = "full"` plays the model, without native calls.

"""
_TRAINED = f"""
## Trained

A tiny model of each of these architectures, of random weights in float32, with the template and the
tokenizer named here, is trained for two steps by the whole `flotilla train`, vLLM on a CPU
included. Rewards are forced, so that both updates are real. At every token that the engine samples,
before and after each of them, its logprob and the trainer's differ by {TOLERANCE:g} at most, and
no attempt is lost. Where the last column says so, two tensor-parallel workers sample, too. The
command `pytest tests/e2e/test_zoo.py` runs all of it.

Gemma 3's weights are drawn with a standard deviation of 0.1, the others' with 0.2: its embeddings
are scaled up and tied, and at 0.2 every attempt repeats its first token.

On CPUs, rollouts compute the logprobs of sampled tokens themselves. vLLM takes them from
`torch.log_softmax`, which rounds away part of the unlikely tokens there: enough, in Gemma's
vocabulary of 262,144, to bring a likely token near the bound above or beyond it. What is left is
the rounding of the logits (`pytest tests/rollout/adapters/test_vllm_logprobs.py`).

"""
_COLUMNS = (
    "family",
    "models",
    "`rollout.dialect`",
    "tokenizer in tests",
    "native calls",
    "`tool_cycle`",
)
_TRAINED_COLUMNS = ("architecture", "chat template", "tokenizer", "`rollout.dialect`", "workers")


def write_page() -> str:
    """Return the page."""
    calls = sum(_count_calls(family) for family in FAMILIES)
    rows = [_describe(family) for family in FAMILIES]
    total = f"{calls} native calls of {len(FAMILIES)} families are read as they were written.\n"
    refused = sorted({(family.name, why) for family in FAMILIES for why in family.refused.values()})
    refusals = [
        (each.models, each.why, f"{each.said}", "yes" if each.plays_full else "no")
        for each in REFUSALS
    ]
    return "".join(
        (
            _HEAD,
            *_table(_COLUMNS, rows),
            f"\n{total}",
            _TAIL,
            *_table(("family", "an argument is refused where"), refused),
            _REFUSED,
            *_table(("model", "why", "message", "full"), refusals),
            _TRAINED,
            *_table(_TRAINED_COLUMNS, map(_describe_trained, ARCHITECTURES)),
        )
    )


def _describe_trained(each: Architecture) -> tuple[str, ...]:
    workers = "1, 2" if each in PARALLEL else "1"
    dialect = ", ".join(f'{key} = "{value}"' for key, value in each.dialect.items())
    return (each.name, f"`{each.template}`", each.tokenizer, f"`{dialect}`", workers)


def _describe(family: Family) -> tuple[str, ...]:
    named = f'name = "{family.dialect}"'
    if family.parser:
        named += f', parser = "{family.parser}"'
    models = ", ".join(f"`{model}`" for model in family.models)
    return (
        family.name,
        models,
        f"`{named}`",
        family.tokenizer,
        str(_count_calls(family)),
        "no" if family.drops_thinking else "yes",
    )


def _count_calls(family: Family) -> int:
    return sum(len(case.calls) for case in family.cases if case.name not in family.refused)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n"
    yield f"|{'---|' * len(columns)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


if __name__ == "__main__":
    PAGE.write_text(write_page())
