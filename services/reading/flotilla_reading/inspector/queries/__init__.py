"""Reads of journals, metrics and token statistics, as plain values. Every query is bounded by an
index and a limit: a page costs the same in a run of a hundred attempts and in one of a million."""
