"""Tuning: the automatic mode. What may be chosen, trying it live, and keeping the fastest."""
