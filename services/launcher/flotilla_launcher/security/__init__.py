"""Tokens, certificates and secrets: minting, sealing, delivery and protection. Clients find a
launcher and its token by `launcher_address.py`."""
