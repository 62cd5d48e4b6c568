"""What if: the same model on other links, more ranks, other codecs. ``commsched simulate``."""
