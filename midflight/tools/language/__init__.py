"""Tools that ask a language model."""
