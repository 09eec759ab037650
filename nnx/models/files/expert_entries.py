"""What configs say about mixtures of experts in more than a number: groups, dense layers, and shared experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnx.models.files.config_entries import Key, checked
from nnx.nn.moe.routing import ExpertGroups

FIRST_DENSE = Key(
    "dense_layers",
    lambda count, values: tuple(range(min(count, values["num_layers"]))),
    lambda layers, config: len(layers),
    kind=int,
)
"""An entry with the number of dense layers, which come first."""

LISTED_DENSE = Key(
    "dense_layers",
    lambda kinds, values: tuple(i for i, kind in enumerate(kinds) if kind == "dense"),
    lambda layers, config: ["dense" if i in layers else "sparse" for i in range(config.num_layers)],
    kind=tuple[str, ...],
)
"""An entry that lists "dense" or "sparse" for each layer."""

NUM_SHARED = Key(
    "shared_features",
    lambda count, values: count * values["hidden_features"] or None,
    lambda features, config: (features or 0) // config.hidden_features,
    kind=int,
)
"""An entry with the number of shared experts, each as large as the others."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """The part of a decoder's config that sets `expert_groups`.

    Attributes:
        best: the number of experts whose scores are added up to that of their group.
    """

    best: int = 2

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return {"n_group", "topk_group"}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        count, selected = (checked(entries.get(name) or 1, int, name, where) for name in ("n_group", "topk_group"))
        return {"expert_groups": None if count == 1 else ExpertGroups(count, selected, self.best)}

    def write(self, config: Any) -> dict[str, Any]:
        groups = config.expert_groups or ExpertGroups(1, 1, self.best)
        return {"n_group": groups.count, "topk_group": groups.selected}
