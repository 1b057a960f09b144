"""Tests of `polarprune.gates`."""
