"""Chat templates that refuse what ours renders, with the tokenizer of the other tests."""

from transformers import AddedToken

from flotilla_environments.tiny_policy.tokenizer import train_tokenizer
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer

# Like Gemma 3's: the roles alternate, and tools have none.
GEMMA = """\
{{- '<bos>' }}
{%- if messages[0]['role'] == 'system' %}
{%- set prefix = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}
{%- set prefix = '' %}{%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
{{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# ChatML, but for `tool` messages: put the check in place of CHECK.
_CHATML = """\
{%- for tool in tools or [] %}
{{- '<|im_start|>system\n' ~ tool | tojson ~ '<|im_end|>\n' }}
{%- endfor %}
{%- for message in messages %}
CHECK
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def chatml(check: str) -> str:
    return _CHATML.replace("CHECK", check)


# The calls of a message, in a form that no reader knows.
STRANGE_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<call:' ~ call.function.name ~ '>' ~ call.function.arguments | tojson ~ '</call>' }}"
    "{%- endfor %}"
)
NATIVE_CALLS = (
    STRANGE_CALLS.replace("'<call:' ~", '\'<tool_call>{"name": "\' ~')
    .replace("~ '>' ~", '~ \'", "arguments": \' ~')
    .replace("~ '</call>'", "~ '}</tool_call>'")
)


def calls_in(template: str) -> str:
    """ChatML whose turns end with their calls."""
    return chatml("").replace("message.content + ", "message.content -}}" + template + "{{- ")


# Like Mistral's, which requires the id of a call.
MISTRAL = chatml(
    "{%- if message.role == 'tool' and (message.tool_call_id | default('') | length) != 9 %}"
    '{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}'
    "{%- endif %}"
)
# One that fails only when a fourth result follows three.
AT_MOST_THREE = chatml(
    "{%- if messages | selectattr('role', 'equalto', 'tool') | list | length > 3 %}"
    '{{- raise_exception("at most three tool results in a row") }}'
    "{%- endif %}"
)


def tokenizer_with(template: str) -> TransformersTokenizer:
    corpus = ["system user assistant model Tools look at name arguments Find it error found done"]
    made = train_tokenizer(corpus * 3, 300)
    marks = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    added: list[str | AddedToken] = [AddedToken(mark, special=True) for mark in marks]
    made.add_tokens(added, special_tokens=True)
    made.chat_template = template
    return TransformersTokenizer(made)


# Like Phi-3's: besides the token of each turn, one closes a conversation that ends.
CLOSED = _CHATML.replace("CHECK\n", "").replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\\n' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}",
)

# ChatML whose messages may show pictures: put the roles whose pictures are left out in place of
# BLIND, and what is written before a picture in place of LABEL.
_SEEING = """\
{%- set ns = namespace(pictures=0) %}
{%- for tool in tools or [] %}
{{- '<|im_start|>system\n' ~ tool | tojson ~ '<|im_end|>\n' }}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in ([message.content] if message.content is string else message.content) %}
{%- if part is string %}{{- part }}
{%- elif part.type == 'text' %}{{- part.text }}
{%- elif message.role not in [BLIND] %}
{%- set ns.pictures = ns.pictures + 1 %}
{{- LABEL '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- endif %}
{%- endfor %}
CALLS
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PAD = "<|image_pad|>"
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>")


def seeing(*blind: str, label: str = "") -> str:
    """ChatML that shows pictures, except in messages of the `blind` roles."""
    roles = ", ".join(f"'{role}'" for role in blind)
    made = _SEEING.replace("BLIND", roles).replace("CALLS", NATIVE_CALLS)
    return made.replace("LABEL", f"{label} ~" if label else "")


def tokenizer_that_sees(template: str) -> TransformersTokenizer:
    """Return a tokenizer with the marks of pictures."""
    made = tokenizer_with(template).fast
    marks: list[str | AddedToken] = [AddedToken(mark, special=True) for mark in _VISION_MARKS]
    made.add_tokens(marks, special_tokens=True)
    return TransformersTokenizer(made)


def vision_ids(tokenizer: TransformersTokenizer) -> tuple[int, int, int, int]:
    """Return the ids of the marks: start, end, picture, video."""
    start, end, image, video = (tokenizer.encode(mark)[0] for mark in _VISION_MARKS)
    return start, end, image, video
