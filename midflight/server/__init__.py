"""Servers. `python -m midflight.server` serves a local model with the protocol of vLLM."""
