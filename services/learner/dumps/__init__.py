"""Files beside the journal that record episodes and the trainer's values for their tokens.

Start at `run_dumps.py`, the learner's interface, and `writer.py`, which writes the files in its own
process. `episode_text.py` turns tokens back into messages."""
