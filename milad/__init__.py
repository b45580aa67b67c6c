"""milad: one daemon that speaks four chat APIs from a local model."""

__version__ = "0.1.0"
