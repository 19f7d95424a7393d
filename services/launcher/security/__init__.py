"""Tokens, certificates and secrets: how they are made, sealed, handed over and kept from others."""
