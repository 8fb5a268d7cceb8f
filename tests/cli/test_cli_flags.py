"""How flags are read and overrides applied: both spellings, types, usual names, fields that no config lists."""

import dataclasses
from pathlib import Path

import pytest

from jaxdiff import comments, errors, methods, models, solvers, weights
from jaxdiff.cli import configs, options
from jaxdiff.cli.flags import Command, Flag, UsageError, check_local, parse
from jaxdiff.configs import creatures, default, digits, folder
from jaxdiff.methods import METHODS

COMMAND = Command(
    "", lambda given: 0, (Flag("workdir", "", ""), Flag("count", 4, ""), Flag("dry_run", False, "")), "file"
)


def read(*arguments):
    return parse("train", COMMAND, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config=digits", "--workdir=runs/a", "--config.mesh.data=-1", "--dry_run"],
        ["--config", "digits", "--workdir", "runs/a", "--config.mesh.data", "-1", "--dry-run"],
        ["--dry_run=true", "--config", "digits", "--config.mesh.data=-1", "--workdir=runs/a"],
    ],
)
def test_flags_with_and_without_an_equals_sign_are_the_same(arguments):
    given = read(*arguments)
    assert (given.config, given.overrides) == ("digits", [("mesh.data", "-1")])
    assert given.values == {"workdir": "runs/a", "count": 4, "dry_run": True}


def test_booleans_take_no_value_from_the_next_argument():
    given = read("--dry_run", "--count", "7")
    assert given.dry_run is True and given.count == 7
    assert read("--dry_run", "--nodry_run").dry_run is False
    assert read("--config.teacher.offload", "--count=3").overrides == [("teacher.offload", "true")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count=many"], "--count=many"),
        (["--count"], "--count.*value"),
        (["--workdir", "--count=3"], "--workdir.*value"),
        (["--dry_run=perhaps"], "true or false"),
        (["--cuont=3"], "did you mean 'count'"),
        (["word"], "'word'"),
    ],
)
def test_flags_that_cannot_be_read(arguments, message):
    with pytest.raises(UsageError, match=message):
        read(*arguments)


def test_urls_are_no_local_paths():
    for path in ("gs://bucket/x", "s3://bucket/x", "file:///tmp/x"):
        with pytest.raises(UsageError, match="local path"):
            check_local("workdir", path)
    check_local("workdir", "runs/a:b")
    check_local("workdir", "")


# ------------------------------------------------------------------------------------------ overrides


def changed(config, **overrides):
    options.override(config, [(key.replace("__", "."), text) for key, text in overrides.items()])
    return config


def test_values_have_the_type_of_the_key():
    config = digits.get_config()
    changed(
        config, train__steps="7", optim__learning_rate="1", teacher__offload="true", sfd__nfe="2,3", teacher__path="7"
    )
    assert (config.train.steps, config.optim.learning_rate, config.teacher.offload) == (7, 1.0, True)
    assert (config.sfd.nfe, config.teacher.path) == ((2, 3), "7")
    assert isinstance(config.optim.learning_rate, float) and config.is_locked
    for key, text in {"train.steps": "1.5", "optim.clip": "x", "teacher.offload": "2", "sfd.nfe": "a"}.items():
        with pytest.raises(UsageError, match=f"--config.{key}={text}"):
            options.override(config, [(key, text)])


def test_fields_that_the_config_does_not_list_can_be_set():
    config = changed(
        digits.get_config(),
        model__fields__num_classes="0",
        data__options__flip="true",
        sample__options__churn="10",
        optim__options__b2="0.99",
        ema__options__images="1000",
        noise__assignment_options__within_class="True",
        model__fields__control__alpha="8",
    )
    assert config.model.fields.num_classes == 0 and config.data.options.flip is True
    assert config.sample.options.to_dict() == {"churn": 10.0} and config.optim.options.b2 == 0.99
    assert config.ema.options.images == 1000.0 and config.noise.assignment_options.within_class is True
    assert config.model.fields.control.alpha == 8 and config.is_locked


def test_what_may_be_set_is_what_the_chosen_one_takes():
    """Names are looked up after all listed keys are set, wherever they stand on the line."""
    config = changed(creatures.get_config("tiny"), model__fields__patch="2", model__name="dit")
    assert config.model.fields.patch == 2
    assert changed(folder.get_config("a"), data__options__path="12").data.options.path == "12"  # text stays text
    replaced = changed(digits.get_config(), model__fields='{"width": 8}', model__fields__blocks="2")
    assert replaced.model.fields.to_dict() == {"width": 8, "blocks": 2}
    assert changed(digits.get_config(), data__options__control="crop,flip").data.options.control == ("crop", "flip")


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("model.fields.num_clases", "0", "did you mean 'num_classes'"),
        ("model.fields.heads", "2", "model.name='unet'.*'heads'"),
        ("model.fields.num_classes", "none", "--config.model.fields.num_classes=none"),
        ("sample.options.s_churn", "10", "did you mean 'churn'"),
        ("optim.options.beta2", "0.99", "did you mean 'b2'"),
        ("data.options.filp", "true", "did you mean 'flip'"),
        ("model.fields", "3", "--config.model.fields.*dict"),
        ("optim.lr", "1", "optim.learning_rate"),
        ("train.lr", "1", "optim.learning_rate"),
        ("data.bs", "1", "data.batch_size"),
        ("sample.cfg_scale", "1", "sample.guidance"),
        ("model", "1", "'model'"),
    ],
)
def test_keys_that_cannot_be_set_name_the_nearest(key, text, message):
    with pytest.raises(UsageError, match=message):
        options.override(digits.get_config(), [(key, text)])


# ------------------------------------------------------------------------------------------ usual names


@pytest.mark.parametrize(
    ("name", "table", "ours"),
    [
        ("ddim", solvers.SOLVERS, "euler"),
        ("dpmpp_2m", solvers.SOLVERS, "dpmpp2m"),
        ("DPM++2M", solvers.SOLVERS, "dpmpp2m"),
        ("euler_a", solvers.SOLVERS, "ancestral"),
        ("karras", solvers.GRIDS, "polynomial"),
        ("sd15", weights.KINDS, "sd_unet"),
        ("sd1.5", weights.KINDS, "sd_unet"),
        ("sdxl", weights.KINDS, "sdxl_unet"),
        ("sd3.5", weights.KINDS, "sd3"),
        ("sdxl", models.MODELS, "latent_unet"),
        ("sd3", models.MODELS, "mmdit"),
    ],
)
def test_usual_names_lead_to_ours(name, table, ours):
    with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
        errors.pick(table, name, "thing")


def test_every_alias_is_plain_and_leads_somewhere():
    assert all(alias == alias.lower() and alias.isalnum() for alias in errors.ALIASES)
    assert errors.nearest("lr", ["warmup"]) == "" and errors.closest("lr", ["lr_", "learning_rate"]) == [
        "learning_rate"
    ]


# ------------------------------------------------------------------------------------------ comments


def test_every_key_of_the_default_config_is_found_in_its_source():
    known = configs.key_comments()
    assert set(options.keys(default.get_config())) <= set(known)
    assert known["seed"] == "[0, 2**32) of initialisation, noise and data order"
    assert known["data.source"].startswith("digits, shapes")  # of a value in parentheses
    assert known["model.fields"].endswith("data.options.control records")  # of two lines
    assert known["optim.learning_rate"] == "[0, inf)"


@dataclasses.dataclass(frozen=True)
class Inner:
    """Fields of a field."""

    net: str = "alex"  # which one


@dataclasses.dataclass(frozen=True)
class Base:
    """Fields that a method inherits."""

    rate: float = 0.1  # of its updates
    steps: int = 1  # overridden below
    inner: Inner = dataclasses.field(default_factory=Inner)


@dataclasses.dataclass(frozen=True)
class Options(Base):
    """Fields of a method."""

    steps: int = 4  # Langevin steps
    plain: float = 0.5
    scheme: tuple[str, ...] = (
        "eps",  # what they move
        "z",  # and how
    )

    # not of a field
    last: tuple[int, ...] = ()  # first line
    #                             second line


def test_comments_of_dataclass_fields():
    assert comments.field_comments(Options) == {
        "rate": "of its updates",
        "steps": "Langevin steps",
        "inner.net": "which one",
        "plain": "",
        "scheme": "what they move and how",
        "last": "first line second line",
    }


def test_options_are_read_from_their_source_as_from_their_classes():
    declared = {}
    sections = {**{name: entry.options for name, entry in METHODS.items()}, "lora": methods.lora.Options}
    for section, cls in sections.items():
        declared |= {f"{section}.{name}": text for name, text in comments.field_comments(cls).items()}
    assert comments.option_comments(Path(methods.__file__).parent) == declared
    assert {"emd.steps", "emd.score_rate", "emd.mcmc_sigma", "sfd.lpips.net", "consistency.last"} <= set(declared)
    assert [name for name, text in declared.items() if not text] == []  # each has a comment


def test_a_config_is_described_by_its_values_and_comments():
    lines = configs.describe(digits.get_config("tiny")).splitlines()
    (steps,) = [line.split() for line in lines if line.startswith("  --config.train.steps=")]
    assert steps[0] == "--config.train.steps=4" and "optimizer steps" in " ".join(steps)
    assert any("--config.emd.steps=16" in line and "Langevin steps" in line for line in lines)  # of a base class
    assert any("--config.emd.mcmc_sigma=0.3" in line and "--mcmc_steps" in line for line in lines)
    assert any("--config.sfd.lpips.net=alex" in line and "alex, vgg" in line for line in lines)  # of a nested one
    assert any("--config.diffusion.cond_dropout=0.1" in line and "probability" in line for line in lines)
    assert any("--config.model.fields.attention=(4,)" in line and "resolutions at which" in line for line in lines)
    assert any("--config.model.fields.NAME" in line and "num_classes" in line for line in lines)


def test_a_config_of_ones_own_must_have_get_config(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="get_config"):
        configs.load(str(tmp_path / "mine.py"))
    (tmp_path / "mine.py").write_text(
        "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({'a': 1})\n"
    )
    assert configs.load(str(tmp_path / "mine.py")).to_dict() == {"a": 1}
