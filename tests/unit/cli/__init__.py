"""Tests of `polarprune.cli`."""
