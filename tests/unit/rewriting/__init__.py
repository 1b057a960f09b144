"""Tests of `polarprune.rewriting`."""
