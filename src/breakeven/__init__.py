"""breakeven: at which load does speculative decoding stop paying, and serving where it never costs you."""

__version__ = "0.1.0"
