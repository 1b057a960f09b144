"""Tests of `polarprune.cost`."""
