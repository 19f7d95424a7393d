"""Episodes that a reader plays itself, to check tasks or to collect some. `ports.py` says what an
episode offers, `world.py` brings one to a state and grades it, and `solutions.py` is the file of
recorded solutions."""
