"""Formats of the files in a run's folder, which the learner writes and readers read.

`journal_file.py`, `trajectory_tables.py` and `trajectory_codec.py` are the journal's,
`metric_lines.py` those of metrics and alarms, `token_stats.py` and `dump_files.py` those of dumps;
with `holds.py` a reader keeps what it shows from being pruned."""
