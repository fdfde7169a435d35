"""Facts about countries."""
