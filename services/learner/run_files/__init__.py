"""Files of a run that several rooms read, and what they tell of its progress: checkpoints'
manifests and `metrics.jsonl`."""
