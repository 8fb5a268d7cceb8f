"""Multi-stage training in one config: other data or resolutions, each stage starting from the previous one.

    c.curriculum = ConfigDict({
        "stage1": {"data": {"options": {"image_size": 16}}, "train": {"steps": 2000}},
        "stage2": {"data": {"options": {"image_size": 32}}, "noise": {"shift": 2.0}, "model": {"fields": {"grid": 8}}},
    })

A stage is the config with its changes, trained in workdir/<stage>; stages run in the order of their names.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxdiff.errors import choose

# sections with free-form keys
OPEN = ("options", "fields", "sigma_options", "assignment_options", "weight_options", "score_weight_options")


def stages(config: ConfigDict) -> list[tuple[str, ConfigDict]]:
    """Each stage's name and config, in order."""
    made = []
    for name in sorted(config.curriculum):
        stage = config.copy_and_resolve_references()
        with stage.unlocked():
            stage.curriculum = ConfigDict()
            _change(stage, config.curriculum[name], f"curriculum.{name}")
        made.append((name, stage))
    return made


def _change(config: ConfigDict, changes: ConfigDict, path: str) -> None:
    for name, value in changes.items():
        if path.rsplit(".", 1)[-1] not in OPEN:
            choose(name, config, f"key in {path}")
        if isinstance(value, ConfigDict) and isinstance(config.get(name), ConfigDict):
            _change(config[name], value, f"{path}.{name}")
        else:
            config[name] = value
