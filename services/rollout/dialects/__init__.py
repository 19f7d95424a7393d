"""How a family of models reads and writes: the prompt, what follows a turn, and the calls in it.

Read the `Dialect` port in `../ports.py`, then `template.py` (the model's own chat template) and
`full.py` (everything said in a system message). `rehearsal.py` proves one before it is used.
"""
