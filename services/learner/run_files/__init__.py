"""Files of a run that several rooms read to find its progress: checkpoint manifests and
`metrics.jsonl`."""
