"""A shop's back office: enter orders."""
