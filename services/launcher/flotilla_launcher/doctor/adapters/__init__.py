"""Probes that need a vendor's package or a gateway of their own; most run in a child process."""
