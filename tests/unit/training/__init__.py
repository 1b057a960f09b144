"""Tests of `polarprune.training`."""
