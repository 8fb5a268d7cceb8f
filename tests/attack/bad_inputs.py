"""Bad inputs, each given to the function or command that takes it, as a user would: python bad_inputs.py FOLDER.

Every one must end in an error that jaxdiff raises on purpose, of one line, before anything is computed. Prints a JSON
line: the number of cases, and those that were accepted or ended otherwise. Runs without the shape checks of the tests.
"""

import contextlib
import io
import json
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

import jaxdiff
from jaxdiff import conventions, data, denoisers, evaluation, models, noise, solvers, training
from jaxdiff.cli import main
from jaxdiff.configs import default
from jaxdiff.errors import raised_on_purpose
from jaxdiff.weights import files

NAN, INF = float("nan"), float("inf")
IMAGES = np.zeros((4, 8, 8, 3), np.float32)
FIELDS = {"patch": 2, "depth": 1, "width": 32, "heads": 4}
IDENTITY = denoisers.gaussian(0.0, 1.0)

CONFIG = {  # values of each key that no run can have
    "seed": (-1, 2**32),
    "data.batch_size": (0, -8),
    "data.workers": (-1, 10**6),
    "denoiser.sigma_data": (0.0, -0.5, NAN, INF),
    "noise.mean": (NAN, INF),
    "noise.std": (-1.0, NAN),
    "noise.shift": (0.0, -1.0, NAN, INF),
    "cond.padding_noise": (-0.1, NAN),
    "optim.learning_rate": (-1.0, NAN, INF),
    "optim.clip": (-1.0, NAN),
    "optim.warmup_images": (-1,),
    "optim.accum_steps": (0, -2),
    "optim.name": ("adma",),
    "optim.decay": ("cosinus",),
    "ema.kind": ("halflife",),
    "ema.widths": ((0.1, -0.1), (NAN,)),
    "ema.snapshot_every": (-3,),
    "train.steps": (-5, 0, 2**31),
    "train.log_every": (0, -1),
    "train.sample_every": (-1,),
    "train.eval_every": (-1,),
    "train.save_every": (0, -1),
    "train.on_nonfinite": ("ignore",),
    "checkpoint.keep": (0, -1),
    "mesh.fsdp": (-2, 0),
    "mesh.min_size": (-1,),
    "sample.solver": ("hune",),
    "sample.timestamps": (0, -1, 10**9),
    "sample.rho": (0.0, -7.0, NAN),
    "sample.sigma_min": (0.0, -1.0, NAN),
    "sample.sigma_max": (-80.0, NAN, INF, 0.001),
    "sample.guidance": (NAN, INF),
    "sample.control_guidance": (NAN,),
    "sample.average": (-0.1, 1.0, NAN),
    "sample.batch_size": (0, -1),
    "sample.count": (-1,),
    "sample.grid": ("cubic",),
    "eval.samples": (0, -5),
    "eval.neighbours": (0,),
    "eval.seed": (-1,),
    "diffusion.cond_dropout": (-0.1, 1.0, NAN),
    "diffusion.weight": ("edmm",),
    "sfd.nfe": ((0,), (-2,)),
    "consistency.target_decay": (1.0, NAN),
    "emd.steps": (0, -1),
    "model.name": ("units",),
    "model.dtype": ("float8",),
}
MODEL = (  # fields of a DiT and of a UNet that no network can have
    *(("dit", {**FIELDS, **bad}) for bad in (
        {"patch": 0}, {"patch": -2}, {"patch": 2.5}, {"width": 0}, {"width": 33}, {"width": 34}, {"heads": 0}, {"heads": 3},
        {"depth": -1}, {"mlp_ratio": 0.0}, {"mlp_ratio": NAN}, {"num_classes": -1}, {"grid": -1}, {"width": "32"},
    )),
    *(("unet", {"resolution": 8, "width": 8, "channel_mult": (1,), **bad}) for bad in (
        {"channel_mult": ()}, {"channel_mult": (0, 1)}, {"channel_mult": 2}, {"dropout": 1.0}, {"dropout": NAN},
        {"width": -8}, {"patch": 0}, {"resolution": 0}, {"blocks": -1}, {"augment_dim": -1},
    )),
    ("edm2", {"channel_mult": ()}), ("edm2", {"channels_per_head": 0}), ("edm2", {"res_balance": NAN}),
    ("mlp", {"width": 0}), ("mlp", {"depth": -1}), ("flux", {"heads": 0}), ("latent_unet", {"groups": 0}),
)  # fmt: skip
CALLS = {
    "ancestral eta NaN": lambda: solvers.ancestral(NAN),
    "ancestral eta 50": lambda: solvers.ancestral(50.0),
    "ancestral eta -1": lambda: solvers.ancestral(-1.0),
    "sde_dpmpp2m eta NaN": lambda: solvers.sde_dpmpp2m(NAN),
    "heun churn NaN": lambda: solvers.heun(churn=NAN),
    "heun churn inf": lambda: solvers.heun(churn=INF),
    "renoise floor NaN": lambda: solvers.make("renoise", floor=NAN),
    "dpm2 r NaN": lambda: solvers.make("dpm2", r=NAN),
    "grid of 10^9": lambda: solvers.grid(10**9, 0.002, 80.0),
    "grid with NaN": lambda: solvers.grid(4, NAN, 80.0),
    "grid rho NaN": lambda: solvers.grid(4, 0.002, 80.0, rho=NAN),
    "guidance NaN": lambda: denoisers.guided(IDENTITY, NAN, {"label": 1}),
    "guidance complex": lambda: denoisers.guided(IDENTITY, 1j, {"label": 1}),
    "control_scale NaN": lambda: denoisers.guided(
        IDENTITY, 1.0, {"label": 1}, control_scale=NAN, control_null={"a": 1}
    ),
    "edm sigma_data 0": lambda: denoisers.edm(lambda x, c, cond: x, 0.0),
    "edm sigma_data NaN": lambda: denoisers.edm(lambda x, c, cond: x, NAN),
    "EDM sigma_data -1": lambda: conventions.EDM(-1.0),
    "Flow time_scale NaN": lambda: conventions.Flow(NAN),
    "DDPM shift NaN": lambda: conventions.DDPM(shift=NAN),
    "denoiser sigma NaN": lambda: IDENTITY(jnp.ones((1, 2)), NAN),
    "denoiser x complex": lambda: IDENTITY(jnp.ones((1, 2), jnp.complex64), 1.0),
    "threshold floor NaN": lambda: denoisers.thresholded(IDENTITY, floor=NAN),
    "mixture stds NaN": lambda: denoisers.gaussian_mixture(np.zeros((2, 2)), NAN),
    "assign NaN images": lambda: noise.assign(jnp.full((4, 2), NAN), jnp.ones((4, 2))),
    "assign infinite noise": lambda: noise.assign(jnp.ones((4, 2)), jnp.full((4, 2), INF)),
    "assign integers": lambda: noise.assign(jnp.ones((4, 2), int), jnp.ones((4, 2))),
    "assign complex": lambda: noise.assign(jnp.ones((4, 2), jnp.complex64), jnp.ones((4, 2))),
    "features of NaN": lambda: evaluation.extract(evaluation.feature_net("digits"), [IMAGES + NAN]),
    "features of 0..255 floats": lambda: evaluation.extract(evaluation.feature_net("digits"), [IMAGES + 200]),
    "features of integers": lambda: evaluation.extract(evaluation.feature_net("digits"), [IMAGES.astype(int)]),
    "features of complex": lambda: evaluation.extract(evaluation.feature_net("digits"), [IMAGES.astype(complex)]),
    "arrays 0..255 floats": lambda: data.load("arrays", images=IMAGES + 200),
    "arrays NaN": lambda: data.load("arrays", images=IMAGES + NAN),
    "arrays complex": lambda: data.load("arrays", images=IMAGES.astype(complex)),
    "flip no": lambda: data.load("digits", flip="no"),
    "shuffle no": lambda: data.load("digits", shuffle="no"),
    "image_size 8.5": lambda: data.load("digits", image_size=8.5),
    "augment NaN": lambda: data.load("digits", augment=NAN),
    "max_corrupt 2": lambda: data.load("digits", max_corrupt=2.0),
}
COMMANDS = (
    ["quickstart", "--steps=-5"],
    ["quickstart", "--samples=-1"],
    ["quickstart", "--steps=many"],
    ["sample", "--workdir=RUN", "--count=-2"],
    ["sample", "--workdir=RUN", "--seed=-1"],
    ["sample", "--workdir=RUN", "--nfe=-3"],
    ["sample", "--workdir=RUN", "--config.sample.guidance=nan"],
    ["sample", "--workdir=RUN", "--config.sample.timestamps=1000000000"],
    ["sample", "--workdir=RUN", "--labels=99"],
    ["sample", "--workdir=NOWHERE"],
    ["train", "--config=digits", "--workdir=NEW", "--config.train.steps=-5"],
    ["train", "--config=digits", "--workdir=NEW", "--config.optim.learning_rate=nan"],
    ["features", "extract", "--workdir=RUN", "--side=-1", "--out=NEW"],
    ["features", "extract", "--workdir=RUN", "--sigma=nan", "--out=NEW"],
)


def build(key, value):
    config = default.get_config()
    config.data.source, config.model.name = "mixture", "mlp"
    *parents, last = key.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    with section.ignore_type():
        section[last] = value
    return training.prepare(config, jax.devices()[:1])


def damaged(folder, run):
    """Files that are damaged, each with what reads it."""
    export = run / "export.safetensors"
    whole, arrays = export.read_bytes(), load_file(export)
    name = next(iter(arrays))

    def reads(content):
        def read():
            export.write_bytes(content)
            try:
                return jaxdiff.load(run).params
            finally:
                export.write_bytes(whole)

        return read

    def other(change):
        save_file({**arrays, name: change(arrays[name])}, folder / "x.safetensors")
        return reads((folder / "x.safetensors").read_bytes())

    yield from ((f"export cut to {n}", reads(whole[:n])) for n in (0, 4, 100, len(whole) // 2, len(whole) - 1))
    yield "export header of 2^60", reads((2**60).to_bytes(8, "little") + whole[8:])
    yield "export of NaN", other(lambda a: a * np.float32(NAN))
    yield "export of int8", other(lambda a: a.astype(np.int8))
    yield "export of float64", other(lambda a: a.astype(np.float64))
    config = (run / "config.json").read_bytes()

    def configured(content):
        def read():
            (run / "config.json").write_bytes(content)
            try:
                return jaxdiff.load(run)
            finally:
                (run / "config.json").write_bytes(config)

        return read

    for content in (
        b"",
        b"null",
        b"[]",
        b"{}",
        b"3",
        config[: len(config) // 2],
        config.replace(b"0.5", b"0.6"),
        b"\xff",
    ):
        yield f"config.json {content[:12]!r}", configured(content)
    yield from archives(folder)
    yield from images(folder)


def archives(folder):
    np.savez(folder / "whole.npz", images=np.full((4, 8, 8, 3), 7, np.uint8))
    whole = (folder / "whole.npz").read_bytes()
    at = whole.index(b"\7" * 64) + 3
    for label, content in {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:at] + b"\6" + whole[at + 1 :],
        "not a zip": b"x" * 500,
    }.items():
        path = folder / f"{label}.npz"
        path.write_bytes(content)
        yield f"npz {label}", lambda path=path: data.load("arrays", images=path)
        yield f"weights npz {label}", lambda path=path: files.read(path)
    np.savez(folder / "objects.npz", images=np.array([{}], dtype=object))
    yield "npz of objects", lambda: data.load("arrays", images=folder / "objects.npz")
    with zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", b"\0" * 2**29)
    yield "npz bomb", lambda: data.load("arrays", images=folder / "bomb.npz")


def images(folder):
    def folder_of(name, **content):
        (folder / name).mkdir()
        for file, value in content.items():
            (folder / name / file.replace("_", ".")).write_bytes(value)
        return lambda: data.load("folder", path=folder / name).take(0, 1)

    picture, large = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    Image.new("1", (9000, 9000)).save(large, "PNG")
    yield "a broken image", folder_of("broken", a_png=b"\x89PNG broken")
    yield "a cut image", folder_of("cut", a_png=picture.getvalue()[:40])
    yield "an empty image", folder_of("empty", a_png=b"")
    yield "an image of 81 million pixels", folder_of("large", a_png=large.getvalue())
    yield "captions of a list", folder_of("list", a_png=picture.getvalue(), captions_json=b"[1]")
    yield "captions cut", folder_of("cutoff", a_png=picture.getvalue(), captions_json=b'{"a.png": ')
    yield "captions in another encoding", folder_of("latin", a_png=picture.getvalue(), captions_csv=b"a.png,\xe9\n")
    yield "an empty folder", folder_of("nothing")


def command(words, folder, run):
    """The exit code and message of a command; one that ends well is accepted."""
    places = {"RUN": str(run), "NOWHERE": str(folder / "nowhere"), "NEW": str(folder / "new")}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    if code == 2 and len(err.getvalue().strip().splitlines()) == 1:
        raise ValueError(err.getvalue().strip())
    return code


def cases(folder, run):
    for key, values in CONFIG.items():
        for value in values:
            yield f"{key}={value!r}", lambda key=key, value=value: build(key, value)
    for name, fields in MODEL:
        yield f"{name} {fields}", lambda name=name, fields=fields: models.build(name, **fields)
    yield from CALLS.items()
    yield from damaged(folder, run)
    for words in COMMANDS:
        yield " ".join(words), lambda words=words: command(words, folder, run)


def trained(workdir):
    config = default.get_config()
    config.data.source, config.model.name, config.model.fields = "digits", "dit", {**FIELDS, "learn_variance": False}
    config.train.steps, config.data.batch_size, config.sample.count, config.compile_cache = 1, 8, 0, ""
    training.train(config, workdir, quiet=True, devices=jax.devices()[:1])
    return workdir


def attack(folder):
    count, bad = 0, []
    for name, call in cases(folder, trained(folder / "run")):
        count += 1
        try:
            call()
        except Exception as error:
            here = raised_on_purpose(error, ("jaxdiff", "__main__"))
            if not here or "\n" in str(error):
                bad.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            bad.append(f"{name}: accepted")
    return {"cases": count, "bad": bad}


if __name__ == "__main__":
    print(json.dumps(attack(Path(sys.argv[1]))))
