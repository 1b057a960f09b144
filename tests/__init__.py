"""Tests: `unit` mirrors the packages of the library, `helpers` holds what tests share."""
