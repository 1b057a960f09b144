"""Tests of `polarprune.files`."""
