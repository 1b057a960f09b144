"""Tests of `polarprune.analysis`."""
