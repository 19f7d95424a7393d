"""Run specs: `spec_files.py` reads TOML and JSON, `config.py` merges defaults and overrides,
`spec.py` has what all services share."""
