"""What several test files share: networks, comparisons, tiny data sets, and attacks on files."""
