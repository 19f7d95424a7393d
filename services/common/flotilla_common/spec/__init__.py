"""Run specs: `spec_loading.py` reads TOML and JSON with overrides, `config.py` checks tables,
`spec.py` has what all services share, `data_table.py` is short for prepared data, `old_names.py`
translates names that modules had before."""
