"""The version, read by the build and compared between ranks."""

__version__ = "0.1.0"
