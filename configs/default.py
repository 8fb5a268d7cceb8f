"""Every field of a config, with one comment each. Other configs change what they need and lock the result.

A comment that begins with an interval declares the range of a number, which is checked when a run is built
(jaxdiff/ranges.py). A config file is Python code: run only those that you trust.
"""

import dataclasses

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.methods import METHODS, lora

ARGUMENTS: dict[str, str] = {}


def get_config(arg: str = "") -> ConfigDict:
    argument(arg, ARGUMENTS)
    c = ConfigDict()
    c.seed = 0  # [0, 2**32) of initialisation, noise and data order
    _problem(c)
    for name, entry in METHODS.items():  # options of each method: jaxdiff/methods/NAME.py has their comments
        c[name] = section(entry.options)
    c.lora = section(lora.Options)  # low-rank updates of a frozen base: jaxdiff/methods/lora.py has the comments
    _training(c)
    _results(c)
    c.curriculum = ConfigDict()  # stages by name, each with its changes to this config (training/curriculum.py)
    c.compile_cache = "~/.cache/jaxdiff"  # folder where compiled programs are cached between runs; "" = off
    return c


def _problem(c: ConfigDict) -> None:
    """What is trained: data, network, convention."""
    c.data = ConfigDict()
    c.data.source = (
        "digits"  # digits, shapes, creatures, arrays, latents, folder, array_records, tfds, mixture, prompts, blank
    )
    c.data.options = ConfigDict()  # of that source, as {"path": "photos"}, and of data.build, as {"flip": True}
    c.data.batch_size = 128  # [1, 2**31) global, over all devices and processes
    c.data.workers = 0  # [0, 1024] threads that decode images; 0 = one per core

    c.model = ConfigDict()
    c.model.name = "unet"  # unet, edm2, dit, mdt, pixart, mmdit, flux, latent_unet, mlp; FILE.py:NAME of your own
    c.model.sha256 = ""  # of that file, recorded by the run
    c.model.fields = ConfigDict()  # of that model; num_classes and channels follow the data when left out, and
    #                                control = {"alpha": 8.0...} conditions on what data.options.control records
    c.model.dtype = "float32"  # of network compute: float32 or bfloat16; parameters stay float32
    c.model.remat = ""  # recompute activations instead of storing them: "" (no), full, dots, dots_no_batch

    c.denoiser = ConfigDict()
    c.denoiser.kind = "edm"  # the network's convention: edm, ddpm, flow
    c.denoiser.sigma_data = 0.5  # (0, inf) edm: standard deviation of the data
    c.denoiser.prediction = "eps"  # ddpm: eps, v, x0
    c.denoiser.schedule = "linear"  # ddpm: linear, sqrt_linear, cosine
    c.denoiser.time_scale = 1000.0  # (0, inf) flow: the network's time is this times t; SiT: 1
    c.denoiser.to_data = False  # flow: time and prediction run from noise to data, as in SiT

    c.method = ConfigDict()
    c.method.name = "diffusion"  # the training algorithm: diffusion, consistency, sfd, emd, diff_instruct, sid,
    #                                dmd2, f_distill, uni_instruct, meanflow, shortcut, trajectory, scm, facm

    c.teacher = ConfigDict()  # of a distillation
    c.teacher.kind = (
        "run"  # run (a workdir), edm, dit... (public weights), python, analytic (mixture data), fresh (untrained)
    )
    c.teacher.path = ""  # that workdir, the weights' file, or FILE.py:load for python (docs/own_teacher.md)
    c.teacher.sha256 = ""  # of that Python file, recorded by the run
    c.teacher.own = False  # python: the student has the teacher's network, and starts from its parameters
    c.teacher.fields = ConfigDict()  # of its network, where the student's model.fields are others; empty: the same
    c.teacher.offload = False  # kept in host memory and copied to the devices in each step


def _training(c: ConfigDict) -> None:
    """How it is trained."""
    c.noise = ConfigDict()
    c.noise.sigma_sampler = (
        "lognormal"  # lognormal, logit_normal, uniform, cosine, polynomial, discrete (the ddpm schedule)
    )
    c.noise.mean = -1.2  # (-inf, inf) of ln sigma, for lognormal and logit_normal
    c.noise.std = 1.2  # [0, inf)
    c.noise.shift = 1.0  # (0, inf) sigma -> shift * sigma for images `shift` times larger: training, sampling, ddpm
    c.noise.assignment = "none"  # of a batch's noise to its images: none, hungarian, knn, hungarian_l2, hungarian_l1...
    c.noise.assignment_options = ConfigDict()  # groups (0 = one per device), within_class, half, exact, k, limit

    c.cond = ConfigDict()
    c.cond.padding = ""  # of text: "" (text_mask hides it), or without a mask zero, replicate, noisy (copies of tokens)
    c.cond.padding_noise = 0.02  # [0, inf) of noisy copies, in standard deviations of a caption's tokens

    c.optim = ConfigDict()
    c.optim.name = "adam"  # adam, adamw, adafactor, lion, radam, sgd
    c.optim.learning_rate = 1e-3  # [0, inf)
    c.optim.options = ConfigDict()  # of that optimizer, for example {"b2": 0.99}
    c.optim.clip = 0.0  # [0, inf) global gradient norm; 0 = off
    c.optim.warmup_images = 0  # [0, inf) linear warm-up
    c.optim.decay = "constant"  # constant, cosine, linear, sqrt, step
    c.optim.decay_images = 0  # [0, inf) where cosine and linear end, sqrt begins, step drops
    c.optim.accum_steps = 1  # [1, 2**31) slices of the batch whose gradients are averaged

    c.ema = ConfigDict()
    c.ema.kind = "half_life"  # constant, half_life, power
    c.ema.options = ConfigDict()  # decay; images, ramp; sigma_rel
    c.ema.widths = ()  # (0, 1) relative widths of power-function averages to store; `jaxdiff ema` combines others
    c.ema.snapshot_every = 0  # [0, inf) steps between stored averages of these widths; the last step is stored too

    c.train = ConfigDict()
    c.train.steps = 1000  # [1, 2**31) optimizer steps in total; iterations, for methods with several updates in each
    c.train.log_every = 50  # [1, inf) steps between log lines, and between checks for non-finite values
    c.train.sample_every = 0  # [0, inf) steps between sample grids; 0 = at the end only
    c.train.eval_every = 0  # [0, inf) steps between evaluations; 0 = none
    c.train.save_every = 500  # [1, inf) steps between checkpoints; the end and every stop are saved too
    c.train.on_nonfinite = "stop"  # stop at the first non-finite step, or skip it and count
    c.train.init_from = ""  # workdir, exported file or public weights whose matching parameters this run starts from
    c.train.init_kind = "run"  # run (the first two), or the kind of the weights: edm, dit, sd_unet...

    c.train.profile_steps = ()  # [0, inf) (first, last): steps after `first` up to `last` into WORKDIR/profile

    c.log = ConfigDict()
    c.log.backends = ("stdout", "jsonl", "tensorboard")  # where metrics go; also wandb (docs/logging.md)
    c.log.wandb = ConfigDict()  # arguments of wandb.init
    c.log.wandb.project = "jaxdiff"
    c.log.wandb.mode = "online"  # offline: nothing is sent until `wandb sync`

    c.checkpoint = ConfigDict()
    c.checkpoint.keep = 3  # [1, inf) newest checkpoints kept, besides the best evaluated one
    c.checkpoint.metric = ""  # of the evaluation, smaller is better; "" = its Fréchet or sliced Wasserstein distance

    c.mesh = ConfigDict()
    c.mesh.data = -1  # [-1, inf) devices that split the batch; -1 = all remaining ones
    c.mesh.fsdp = 1  # [-1, inf) devices that split the batch and the parameters
    c.mesh.context = 1  # [-1, inf) devices that split the tokens of a transformer, and the parameters
    c.mesh.tensor = 1  # [-1, inf) devices that split attention heads and MLPs
    c.mesh.gather_first = False  # TPU: gather sharded kernels before products (undocumented options of libtpu)
    c.mesh.min_size = 16384  # [0, inf) parameters below this many elements are not split over fsdp


def _results(c: ConfigDict) -> None:
    """How it is sampled and measured."""
    c.sample = ConfigDict()
    c.sample.solver = "heun"
    c.sample.options = ConfigDict()  # of that solver
    c.sample.timestamps = 18  # [1, 100000] timestamps of the grid
    c.sample.grid = "polynomial"  # polynomial, logsnr, uniform, flow, discrete (the ddpm schedule)
    c.sample.rho = 7.0  # (0, inf) of the polynomial grid
    c.sample.sigma_min = 0.002  # (0, inf)
    c.sample.sigma_max = 80.0  # (0, inf)
    c.sample.afs = False  # the first step is analytic and free
    c.sample.final_denoise = True  # end with x0 = D(x, sigma_min)
    c.sample.guidance = 1.0  # (-inf, inf) classifier-free guidance scale; 1 = off
    c.sample.control_guidance = 1.0  # (-inf, inf) scale of control within guidance: 0 = none, 1 = as other conditions
    c.sample.control = ConfigDict()  # control metadata that samples are conditioned on; -1 = unknown
    c.sample.control.original_size = ()  # [-1, inf) height, width; () = those of the samples
    c.sample.control.crop = (0, 0)  # [-1, inf) top, left
    c.sample.control.flip = 0  # [-1, 1]
    c.sample.control.aspect = 0.0  # [-1, inf) width / height; 0 = that of original_size
    c.sample.average = 0.0  # [0, 1) relative width of an average by `jaxdiff ema` to sample with; 0 = the exported one
    c.sample.weak = ""  # workdir or exported file of a weaker network that guidance leads away from (autoguidance)
    c.sample.batch_size = 256  # [1, 2**31) images sampled at once
    c.sample.count = 100  # [0, 2**31) images in a grid

    c.eval = ConfigDict()
    c.eval.preset = ""  # protocol of a published number: edm, adm, pytorch_fid, clean_fid, fd_dinov2; sets net,
    #                     resize, sfid and neighbours (docs/evaluation.md)
    c.eval.net = "digits"  # feature network: digits, compact, inception, efficientnet_lite0, dinov2; "" = none: sliced
    #                      Wasserstein distance of pixels
    c.eval.weights = ""  # file with that network's weights; not needed for digits and compact
    c.eval.resize = "bilinear"  # how images are resized for it: tensorflow (EDM, ADM), bilinear (pytorch-fid), clean
    c.eval.reference_stats = ""  # FILE.npz of feature moments (`jaxdiff stats`, or mu and sigma), instead of the data
    c.eval.sfid = False  # also the distance in spatial Inception features
    c.eval.neighbours = 5  # [1, inf) k of precision, recall, density and coverage
    c.eval.cache = "~/.cache/jaxdiff/features"  # reference features by image content; "" = computed each time
    c.eval.clip = ""  # a CLIP checkpoint, both encoders: score of samples and their captions, or class names
    c.eval.tokenizer = ""  # its tokenizer.json
    c.eval.clip_formula = "100cos"  # 100cos (100 max(cos, 0)) or hessel (2.5 max(cos, 0) after "A photo depicts")
    c.eval.samples = 2000  # [1, 2**31)
    c.eval.reference = 0  # [0, inf) reference images, by a fixed permutation of the dataset; 0 = all of it
    c.eval.seed = 1  # [0, 2**32)

    c.autoencoder = ConfigDict()  # decodes samples, where the data are latents
    c.autoencoder.kind = ""  # sd_vae, sdxl_vae, taesd; "" = samples stay as they are
    c.autoencoder.path = ""  # the weights' file
    c.autoencoder.options = ConfigDict()  # fields that cannot be inferred from the file, for example {"scale": 0.18215}


def section(options: type) -> ConfigDict:
    """The default options of a method."""
    c = ConfigDict()
    for field in dataclasses.fields(options):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(value):
            value = section(type(value))
        elif isinstance(value, dict):
            value = ConfigDict(value)
        c[field.name] = value
    return c
