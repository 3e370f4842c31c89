"""What a site saves for itself after a run whose method leaves each site parts of its own."""

from __future__ import annotations

from pathlib import Path

from fedstrata.client.setup import Ready
from fedstrata.models import checkpoints
from fedstrata.models.adapter_folder import save_adapters, save_base
from fedstrata.models.adapters import adapted_modules, without_adapters
from fedstrata.models.folders import write_card
from fedstrata.sites.site import Site
from fedstrata.wire.store import write_tensors

OWN_PARTS = "own_parts.safetensors"
MODEL_CARD = """\
The model of the site {site}, which nobody else has. The run's score is the mean over the models of all its sites.
"""
PARTS_CARD = """\
`{file}` holds this site's parts of a model. Its other layers stayed at the server: the whole model is the one in
the folder `shared/` of the run there, with these tensors in it.

    from safetensors.torch import load_file
    model.load_state_dict(load_file("{file}"), strict=False)
"""


def save_own_model(site: Site, ready: Ready, rounds: int, folder: Path) -> None:
    """Save the site's own model; of one whose layers the server held, the parts that are here.

    A run whose server was killed at its end says farewell twice. The second time nothing of the site's own is left
    here, and what was saved stays.
    """
    if folder.exists() and not site.data.store.load(rounds):
        return
    weights = {n: t for own in site.model(rounds).values() for n, t in own.items()}
    if site.shared.keys() == set(ready.runtime.working.parts.names):
        checkpoints.save(ready.loaded, weights, folder, MODEL_CARD.format(site=site.name))
        if ready.loaded.adapter:
            base = save_base(ready.loaded, weights, folder / "base", stays=False)  # the run's start model goes
            save_adapters(ready.loaded, weights, folder / "adapter", base)
    else:
        plain = without_adapters(adapted_modules(ready.loaded.model), weights)
        write_tensors(folder / OWN_PARTS, plain)
        write_card(folder, PARTS_CARD.format(file=OWN_PARTS))
