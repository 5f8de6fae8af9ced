"""The embedded engine: continuous batching and lossless speculation. Knows nothing of the lab."""
