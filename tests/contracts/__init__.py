"""Promises that hold for the library as a whole."""
