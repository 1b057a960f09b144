"""Random networks, and what holds for every one of them: `python -m tests.helpers.fuzz --help`."""
