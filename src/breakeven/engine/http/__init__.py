"""OpenAI-compatible HTTP over an `AsyncEngine`: routes, wire formats, errors and metrics."""
