"""Tests of `polarprune.torch_internals`."""
