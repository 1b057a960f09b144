"""Random networks, and what has to hold for every one of them: `python -m tests.fuzz --help`."""
