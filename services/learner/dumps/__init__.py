"""Files that keep what agents did and what the trainer computed of it, beside the journal.

Start at `run_dumps.py`, which the learner speaks to, and `writer.py`, which writes the files in a
process of its own. `episode_text.py` turns tokens back into messages."""
