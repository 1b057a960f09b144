"""Benchmarks: `measure` runs them, `numbers` holds what they stored, `pages` writes docs from it.

Run a module from the root of the repository:

    python -m benchmarks.measure.steering --help
    python -m benchmarks.pages.results
"""
