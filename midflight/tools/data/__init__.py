"""Tools over the user's own files: tables by SQL, documents by search."""
