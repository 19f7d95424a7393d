"""Dialects of families of models: the prompt, the text after a turn, and the calls in it.

Read the `Dialect` port in `../ports.py`. `../adapters/dialect_choice.py` chooses. Under `auto`,
every family that the `renderers` package knows has the dialect of
`../adapters/renderer_dialect.py`, and any other model that of `template.py`: its own chat template.
`full.py` explains everything in a system message. `tool_reply_text.py` turns tools' answers into
messages. `rehearsal.py` proves a dialect before it is used.
"""
