"""The tokenizer: byte-level BPE in which a name is one token in any position."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
DONE = "<done>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Marks that the policy or the environment writes: kept when control tokens are skipped in decoding.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", DONE)

# A word never carries the space or the quotation mark before it, as it would in most tokenizers:
# copying a name from the prompt into an argument is then copying one token.
WORD_SPLIT = r"[A-Za-z_]+|\d{1,2}|[^A-Za-z_\d]+"

# ChatML. A tool is one line, `name(argument, argument)`, about 20 tokens for a whole toolbox where
# JSON schemas would need 300. Consecutive tool messages share one user turn.
CHAT_TEMPLATE = """\
{%- set ns = namespace(first=0, system='') %}
{%- if messages and messages[0].role == 'system' %}
{%- set ns.first = 1 %}{%- set ns.system = messages[0].content %}
{%- endif %}
{%- if tools %}
{%- set ns.system = ns.system ~ ('\\n\\n' if ns.system else '') ~ 'Tools:' %}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{%- set names = function.parameters.properties | join(', ') %}
{%- set ns.system = ns.system ~ '\\n' ~ function.name ~ '(' ~ names ~ ')' %}
{%- endfor %}
{%- endif %}
{%- if ns.system %}{{- '<|im_start|>system\\n' ~ ns.system ~ '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages[ns.first:] %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn the merges from `corpus`; `vocab_size` is an upper bound, the added tokens excluded.

    The result depends on the corpus alone. Every word of it becomes one token as long as the
    bound leaves room.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of a token that must exist."""
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return found
