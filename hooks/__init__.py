"""commsched.hooks: the DDP communication hook and its relatives."""

from commsched.hooks.attach import attach
from commsched.hooks.hook import hook

__all__ = ["attach", "hook"]
