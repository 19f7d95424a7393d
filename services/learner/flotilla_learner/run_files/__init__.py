"""Files of a run that several rooms read, to find its progress and to whom they belong: checkpoint
manifests and `metrics.jsonl`."""
