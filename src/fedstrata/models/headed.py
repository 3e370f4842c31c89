"""How a model with one of our heads is written, so that Hugging Face's Auto classes load it or say how to.

``config.json`` has a model type that plain transformers does not know, and the encoder's config in it;
a Python file beside it imports this package. So ``AutoModelForSequenceClassification.from_pretrained(folder)``

* gives the model where :mod:`fedstrata.models.heads` has been imported, or with ``trust_remote_code=True``;
* else ends in transformers' own sentence, which names ``trust_remote_code=True``.

A head that transformers would make up, under the encoder's own model type, is given in no case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from fedstrata.models.folders import CODE
from fedstrata.wire.files import write_bytes

CARD = """\
This model has a head that FedStrata adds to the encoder. With the package `fedstrata` installed it is loaded by

    from fedstrata.models.heads import HeadedModel
    model = HeadedModel.from_pretrained(folder)

or by `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)`, a pipeline likewise;
`AutoModel` gives the encoder without the head.
"""
_CLASSES = {
    "AutoConfig": "HeadedConfig",
    "AutoModel": "HeadedEncoder",
    "AutoModelForSequenceClassification": "HeadedModel",
}


class HeadedConfig(transformers.PreTrainedConfig):  # type: ignore[misc]
    """The ``config.json`` of a saved model with one of our heads.

    Attributes:
        encoder: the encoder's config as a dictionary; names and settings of the head stand in it.
    """

    model_type = "fedstrata_headed"
    encoder: dict[str, Any] | None = None

    def plain(self) -> Any:
        """The encoder's config."""
        settings = dict(self.encoder or {})
        return transformers.CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: the code that a folder comes with imports this class, it holds no copy of it."""


def plain_config(config: Any) -> Any:
    """The encoder's config, whichever of the two forms a config has."""
    return config.plain() if isinstance(config, HeadedConfig) else config


def record_every_layer(encoder: Any) -> None:
    """Let transformers find all layers whose states heads take: a first pass may be of a local model."""
    if hooks := getattr(transformers.utils, "output_capturing", None):  # transformers 5.0 finds them at every pass
        hooks.maybe_install_capturing_hooks(encoder)


def write_headed(folder: Path) -> str:
    """Turn a folder whose ``config.json`` is an encoder's with a head's settings into one as described above.

    Returns:
        What its card has to say.
    """
    path = folder / "config.json"
    encoder = json.loads(path.read_text(encoding="utf-8"))
    config = {
        "architectures": ["HeadedModel"],
        "auto_map": {auto: f"{CODE}.{own}" for auto, own in _CLASSES.items()},
        "dtype": encoder.get("dtype"),
        "encoder": encoder,
        "id2label": encoder.get("id2label"),
        "label2id": encoder.get("label2id"),
        "model_type": HeadedConfig.model_type,
    }
    named = {key: value for key, value in config.items() if value is not None}
    write_bytes(path, (json.dumps(named, indent=2, ensure_ascii=False) + "\n").encode())
    code = f"from fedstrata.models.heads import {', '.join(sorted(_CLASSES.values()))}  # noqa: F401\n"
    write_bytes(folder / f"{CODE}.py", code.encode())
    return CARD
