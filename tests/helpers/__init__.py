"""What several test files share: networks, comparisons, data in miniature, programs that attack."""
