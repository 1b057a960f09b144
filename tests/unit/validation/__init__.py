"""Tests of `polarprune.validation`."""
