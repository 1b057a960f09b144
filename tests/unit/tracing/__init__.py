"""Tests of `polarprune.tracing`."""
