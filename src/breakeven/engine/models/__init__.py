"""Model definitions and loading."""
