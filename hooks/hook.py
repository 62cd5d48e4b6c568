"""The hook itself. No ``from __future__ import annotations`` here: DDP compares its annotations."""

import torch
from torch._C._distributed_c10d import GradBucket

from commsched.errors import CommSchedError
from commsched.state import State

__all__ = ["hook"]


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Give a bucket of gradients to commsched, which averages it over the ranks.

    Args:
        state: a `commsched.State`, one for each DDP model.
        bucket: the gradients; averaged in place.

    Returns:
        A future of the bucket's own buffer (of a new sparse tensor where gradients are sparse).

    Example::

        ddp.register_comm_hook(commsched.State(), commsched.hook)
    """
    if not isinstance(state, State):
        raise CommSchedError(
            "commsched.hook needs its state: ddp.register_comm_hook(commsched.State(), "
            f"commsched.hook), not {state!r}"
        )
    return state.on_bucket(bucket)
