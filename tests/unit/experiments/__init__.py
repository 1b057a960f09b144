"""Tests of `polarprune.experiments`."""
