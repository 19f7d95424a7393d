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
# Marks of pictures, as Qwen's families write them.
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
# Marks that the policy or the environment writes: kept when control tokens are skipped in decoding.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", DONE)

# A word never carries the space or the quotation mark before it, as it would in most tokenizers:
# copying a name from the prompt into an argument is then copying one token.
# Numbers are split every two digits, or every three: a coordinate is then one token.
WORD_SPLIT = r"[A-Za-z_]+|\d{1,2}|[^A-Za-z_\d]+"
WIDE_SPLIT = r"[A-Za-z_]+|\d{1,3}|[^A-Za-z_\d]+"

# ChatML. A tool is one line, `name(argument, argument)`, about 20 tokens for a whole toolbox where
# JSON schemas would need 300. Consecutive tool messages share one user turn. Content is text, or
# parts of text and pictures.
CHAT_TEMPLATE = """\
{%- macro show(content) %}
{%- if content is string %}{{- content }}{%- else %}
{%- for part in content or [] %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{%- endmacro %}
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
{{- '\\n<tool_response>\\n' ~ show(message.content) ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ show(message.content) }}
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


def train_tokenizer(
    corpus: Iterable[str], vocab_size: int, *, vision: bool = False
) -> PreTrainedTokenizerFast:
    """Learn the merges from `corpus`; `vocab_size` is an upper bound, the added tokens excluded.
    With `vision` it has the marks of pictures, and coordinates are one token.

    The result depends on the corpus alone. Every word of it becomes one token as long as the
    bound leaves room.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WIDE_SPLIT if vision else WORD_SPLIT), "isolated"),
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
    control = (*CONTROL_TOKENS, *VISION_TOKENS) if vision else CONTROL_TOKENS
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
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
