"""Scripts that measure. Each states a claim or a question and stores its numbers in `numbers`."""
