"""commsched: schedules the gradient communication of DistributedDataParallel.

ddp.register_comm_hook(commsched.State(), commsched.hook)
"""

from commsched.checkpoint import Stateful
from commsched.errors import CommSchedError, SettingsError
from commsched.hooks import attach, hook
from commsched.state import State
from commsched.version import __version__

__all__ = ["CommSchedError", "SettingsError", "State", "Stateful", "__version__", "attach", "hook"]
