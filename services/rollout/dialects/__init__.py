"""How a family of models reads and writes: the prompt, what follows a turn, and the calls in it.

Read the `Dialect` port in `../ports.py`. `../adapters/dialect_choice.py` chooses. Under `auto`,
every family that the `renderers` package knows has the dialect of
`../adapters/renderer_dialect.py`, and any other model that of `template.py`: its own chat template.
`full.py` says everything in a system message. What a tool answered, `tool_replies.py` makes into
messages. `rehearsal.py` proves a dialect before it is used.
"""
