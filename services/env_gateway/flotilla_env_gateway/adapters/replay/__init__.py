"""Recording of runs, and a backend that plays them in place of their environments. Start reading at
`recorder.py`; `player.py` finds what was recorded."""
