"""Tests of `polarprune.channels`."""
