"""One file per head."""
