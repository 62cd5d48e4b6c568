"""Checkpoints: what codecs keep, as one dictionary of plain values and tensors, and back.

    {"format": 1, "world_size": ranks, "step": last iteration,
     "params": {parameter: elements}, "settings": {...}, "verdict": {...} or None,
     "plan": JSON text or "",                              # how the gradients were cut
     "tuning": {...} or None,                              # what the automatic mode has chosen
     "factors": {parameter: {name: tensor}},               # equal on all ranks
     "slots": {rank: {slot: {parameter: tensor}}}}         # "error" and the like: each rank's own

What summed over ranks has not been sent yet, the errors' mass, is what must survive a change of the
number of ranks; a chunk or bucket size may change without a trace, as all is kept by parameter.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from commsched import codecs
from commsched.cutting import joined
from commsched.errors import CommSchedError
from commsched.group import Group
from commsched.layout import Chunk, Layout, Piece, digest_of, first_names
from commsched.memory import Memory
from commsched.plan import Plan, Task
from commsched.settings import Settings

if TYPE_CHECKING:
    from commsched.state import State

__all__ = ["Checkpoint", "Stateful", "cut_by", "gathered", "moved"]

logger = logging.getLogger("commsched")

FORMAT = 1
# Settings that a plan made before anything is measured depends on.
CUT_BY = ("policy", "codec", "codec_rules", "codec_min_numel", "chunk_mb", "fusion_mb", "credit_mb")
Slots = dict[str, dict[str, torch.Tensor]]


@dataclass
class Checkpoint:
    """What a state dictionary holds.

    Attributes:
        world_size: of the run that saved it.
        step: its last iteration.
        params: elements of each parameter; empty where the model was not known.
        settings: those of `CUT_BY`.
        verdict: as `Verdict`'s fields; None where codecs were not priced.
        plan: the plan as JSON text, "" where there was none.
        tuning: see `Trials.to_save`; None where nothing was chosen.
        factors: parameter -> name -> tensor.
        slots: by rank.
    """

    world_size: int
    step: int
    params: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] | None = None
    plan: str = ""
    tuning: dict[str, Any] | None = None
    factors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    slots: dict[int, Slots] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The dictionary. Loads with ``torch.load(weights_only=True)``."""
        return {"format": FORMAT, **vars(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Checkpoint:
        """From one rank's dictionary, a gathered one, or several ranks' in a list.

        Raises:
            CommSchedError: it is none of these.
        """
        rows = [saved] if isinstance(saved, Mapping) else list(saved)
        rows = [{"tuning": None, **row} for row in rows]  # earlier ones have none
        if not rows or any(set(row) != KEYS or row["format"] != FORMAT for row in rows):
            raise CommSchedError(
                "this is not what State.state_dict() of this version of commsched returned"
            )
        parts = [cls(**{k: v for k, v in row.items() if k != "format"}) for row in rows]
        first = parts[0]
        if any((part.world_size, part.step) != (first.world_size, first.step) for part in parts):
            raise CommSchedError("these state dictionaries are of different runs or steps")
        for part in parts[1:]:
            first.slots = {**first.slots, **part.slots}
        return first

    @property
    def digest(self) -> str:
        """Equal on ranks that loaded the same run's state, each with its own slots or not."""
        return digest_of(
            [self.world_size, self.step, self.settings, self.verdict, self.plan, self.tuning]
        )

    def without_tensors(self) -> Checkpoint:
        """What is needed once memory is restored."""
        return replace(self, factors={}, slots={})

    def refuse_other_model(self, params: Mapping[str, int]) -> None:
        """Raise if it is of another model.

        Args:
            params: elements of each of the model's parameters; empty: nothing is known.

        Raises:
            CommSchedError: names the parameters that differ.
        """
        if not params or not self.params or dict(params) == self.params:
            return
        names = {*params, *self.params}
        differ = sorted(n for n in names if params.get(n) != self.params.get(n))
        raise CommSchedError(
            f"this commsched state is of another model: {first_names(differ)} differ in name or "
            "size. Load the state that was saved with this model, or none"
        )

    def restore(self, memory: Memory, rank: int, world_size: int) -> None:
        """Fill a fresh memory.

        Args:
            memory: of this rank.
            rank: this one.
            world_size: the number of ranks now.
        """
        memory.step = self.step
        for param, factors in self.factors.items():
            memory.factors[param] = {
                name: tensor.to(torch.float32, copy=True) for name, tensor in factors.items()
            }
        memory.set_slots(self._slots_for(rank, world_size))

    def _slots_for(self, rank: int, world_size: int) -> Slots:
        if world_size != self.world_size and len(self.slots) == self.world_size:
            return _shared_out(self.slots.values(), world_size)
        if rank not in self.slots or world_size != self.world_size:
            logger.warning(
                "rank %d: this state holds what ranks %s of %d had kept: of the others nothing is "
                "restored. Save state_dict(gather=True), or load all ranks' in a list",
                rank,
                sorted(self.slots),
                self.world_size,
            )
        return self.slots.get(rank, {})

    def plan_now(self, settings: Settings, make: Callable[[Layout], Plan]) -> Plan | None:
        """The saved run's plan; made anew for its buckets where settings have changed since.

        Args:
            settings: in effect now.
            make: plans by them.
        """
        if not self.plan:
            return None
        saved = Plan.from_json(self.plan)
        return saved if self.settings == cut_by(settings) else make(saved.layout)


KEYS = {"format", *(item.name for item in fields(Checkpoint))}


def cut_by(settings: Settings) -> dict[str, Any]:
    """The settings that decide how gradients are cut."""
    return {name: getattr(settings, name) for name in CUT_BY}


def moved(plan: Plan, layout: Layout) -> Plan | None:
    """The same tasks where the same parameters lie in other buckets; None if some do not.

    DDP's first step has other buckets than all later ones. Blocks and shards that begin elsewhere
    round differently, and a resumed run would not repeat the first one's bits.
    """
    tasks = _tasks_in(plan, layout)
    covered = {piece for task in tasks if not task.round for piece in task.chunk.pieces}
    if sum(piece.numel for piece in covered) != sum(spec.numel for spec in layout.buckets):
        return None
    return Plan(plan.policy, layout, tuple(tasks), plan.credit_bytes)


def _tasks_in(plan: Plan, layout: Layout) -> list[Task]:
    """The plan's tasks whose parameters are all in the layout."""
    places = {}
    for index, bucket in enumerate(layout.buckets):
        start = 0
        for param in bucket.params:
            places[param.name] = index, start, param
            start += param.numel
    tasks: list[Task] = []
    for task in plan.tasks:
        spans = list(plan.layout.spans(task.chunk))
        if all(span.param in places for span in spans):
            whole = codecs.get(task.codec).whole_params
            found = [(places[s.param], s.param_start, s.numel) for s in spans]
            pieces = [_piece(place, start, numel, whole) for place, start, numel in found]
            spec = layout.buckets[pieces[0].bucket]
            chunk = Chunk(tuple(pieces if whole else joined(pieces)), spec.dtype, spec.sparse)
            tasks.append(replace(task, index=len(tasks), chunk=chunk))
    return tasks


def _piece(place: Any, start: int, numel: int, whole: bool) -> Piece:
    bucket, offset, param = place
    rows = param.shape[0] if whole and len(param.shape) > 1 else 0
    return Piece(bucket, offset + start, numel, rows)


def gathered(own: Slots, group: Group) -> list[Slots]:
    """Every rank's slots, by rank. Collective; ranks may hold different parameters."""
    mine = [[name, param, t.numel()] for name, rows in own.items() for param, t in rows.items()]
    heard = group.all_gather_bytes(json.dumps(mine).encode())
    keys = sorted({tuple(key) for row in heard for key in json.loads(row)})
    found: list[Slots] = [{} for _ in heard]
    for name, param, numel in keys:
        numbers = own.get(name, {}).get(param)
        rows = group.all_gather(torch.zeros(numel) if numbers is None else numbers)
        for slots, row in zip(found, rows, strict=True):
            slots.setdefault(name, {})[param] = row
    return found


def _shared_out(rows: Iterable[Slots], world_size: int) -> Slots:
    """All ranks' slots summed, and an equal share of that: nothing is lost."""
    total: Slots = {}
    for slots in rows:
        for name, params in slots.items():
            for param, numbers in params.items():
                mine = total.setdefault(name, {})
                mine[param] = numbers / world_size + mine.get(param, 0.0)
    return total


class Stateful:
    """A `State` for ``torch.distributed.checkpoint``, whose keys must be equal on all ranks.

    Example::

        dcp.save({"model": ddp.module, "commsched": commsched.Stateful(state)}, checkpoint_id=path)

    and the same with ``dcp.load``, on any number of ranks. All ranks' errors are gathered.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """One value: the gathered state, as bytes. Collective, as saving is."""
        file = io.BytesIO()
        torch.save(self._state.state_dict(gather=True), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Hand it to the state."""
        data = torch.load(io.BytesIO(saved["state"]), map_location="cpu", weights_only=True)
        self._state.load_state_dict(data)
