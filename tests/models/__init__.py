"""Networks by the patterns in which people write them."""
