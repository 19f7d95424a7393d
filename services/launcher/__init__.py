"""The launcher: turns one run spec into running services, keeps them running, and tells them
where their peers are."""
