"""Files beside the journal that record episodes and the trainer's values for their tokens.

Start at `run_dumps.py`, the learner's interface, and `dump_writer.py`, which writes the files in a
process of its own."""
