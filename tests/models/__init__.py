"""Networks in the patterns that users write."""
