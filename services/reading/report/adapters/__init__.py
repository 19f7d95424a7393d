"""Vendor code of reports: Jinja."""
