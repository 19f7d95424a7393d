"""Tokens, certificates and secrets: how they are made, sealed, handed over and kept from others;
and where clients find a launcher with its token, `launcher_address.py`."""
