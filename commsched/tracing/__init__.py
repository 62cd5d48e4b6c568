"""Tracing: what a rank did when, as spans in a Chrome / Perfetto file; and reading such files."""
