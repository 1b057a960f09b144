"""Tests of `polarprune.report`."""
