"""Programs that strain a pool from outside of its calls, with the helpers that do it.

Each helper exists twice: the one of the core strains it, the one of the model gives what a pool that bears the strain
would give. So the model judges these programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from proof.mutation import cached, forms, limits, naming, starving, waiting

#: Program -> the names of the classes that it is given beside those of pools and plans.
PROGRAMS: dict[Callable[..., None], tuple[str, ...]] = {
    limits.references_to_the_last_one: ("Strain",),
    limits.marks_that_go_round: ("Strain",),
    limits.lists_that_are_broken: ("Strain",),
    limits.released_to_either_end: (),
    limits.blocks_that_come_back: (),
    starving.calls_without_memory: ("Starving",),
    starving.groups_without_memory: ("Starving",),
    naming.namespaces_by_the_hundred: ("Starving",),
    naming.namespaces_that_nobody_needs: ("Starving",),
    naming.events_in_the_midst: ("Draining",),
    waiting.calls_that_wait: ("Other",),
    forms.batches_in_other_forms: ("Forms",),
    forms.tokens_at_their_limits: (),
    forms.texts_of_every_length: (),
    **dict.fromkeys(cached.PROGRAMS, ("Arenas",)),
}
#: Name -> the class for the core, and the one for the model.
HELPERS: dict[str, tuple[type, type]] = {
    "Arenas": (cached.Arenas, cached.Arenas),
    "Strain": (limits.Strain, limits.StrainOfModel),
    "Starving": (starving.Starving, starving.StarvingModel),
    "Draining": (naming.Draining, naming.DrainingModel),
    "Other": (waiting.Other, waiting.OtherOfModel),
    "Forms": (forms.Forms, forms.FormsOfModel),
}


def programs() -> Iterator[tuple[Callable[..., None], dict[str, Any], dict[str, Any]]]:
    """Each program with the classes of the core and of the model, without those of pools and plans."""
    for program, names in PROGRAMS.items():
        yield program, *({name: HELPERS[name][side] for name in names} for side in (0, 1))
