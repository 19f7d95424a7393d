"""Texts from outside: parsing within limits, printing without control characters, and
secrets that are removed."""
