"""Documents as text, and the passages of them that match."""
