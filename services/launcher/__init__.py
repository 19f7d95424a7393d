"""Turns one run spec into running services, keeps them so, and tells them where their peers are."""
