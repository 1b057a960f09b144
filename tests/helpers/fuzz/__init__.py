"""Random networks, and what every one of them must pass: `python -m tests.helpers.fuzz --help`."""
