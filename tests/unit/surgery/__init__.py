"""Tests of `polarprune.surgery`."""
