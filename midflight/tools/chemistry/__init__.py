"""Tools about molecules, by RDKit in a worker process."""
