"""Every field of a config, with one comment each. Other configs change what they need and lock the result."""

import dataclasses

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.methods import METHODS

ARGUMENTS: dict[str, str] = {}


def get_config(arg: str = "") -> ConfigDict:
    argument(arg, ARGUMENTS)
    c = ConfigDict()
    c.seed = 0  # of initialisation, noise and data order
    _problem(c)
    for name, entry in METHODS.items():  # options of each method: jaxdiff/methods/NAME.py has their comments
        c[name] = section(entry.options)
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
    c.data.batch_size = 128  # global, over all devices and processes
    c.data.workers = 0  # threads that decode images; 0 = one per core

    c.model = ConfigDict()
    c.model.name = "unet"  # unet, edm2, dit, mdt, pixart, mmdit, latent_unet, mlp
    c.model.fields = ConfigDict()  # of that model; num_classes and channels follow the data when left out, and
    #                                control = {"alpha": 8.0...} conditions on what data.options.control records
    c.model.dtype = "float32"  # of network compute: float32 or bfloat16; parameters stay float32
    c.model.remat = ""  # recompute activations instead of storing them: "" (no), full, dots, dots_no_batch

    c.denoiser = ConfigDict()
    c.denoiser.kind = "edm"  # the network's convention: edm, ddpm, flow
    c.denoiser.sigma_data = 0.5  # edm: standard deviation of the data
    c.denoiser.prediction = "eps"  # ddpm: eps, v, x0
    c.denoiser.schedule = "linear"  # ddpm: linear, sqrt_linear, cosine

    c.method = ConfigDict()
    c.method.name = "diffusion"  # the training algorithm: diffusion, consistency, sfd, emd

    c.teacher = ConfigDict()  # of a distillation; it has the architecture of model.fields
    c.teacher.kind = (
        "run"  # run (a workdir), edm, dit, sd_unet... (public weights), analytic (mixture data), fresh (untrained)
    )
    c.teacher.path = ""  # that workdir, or the weights' file
    c.teacher.offload = False  # kept in host memory and copied to the devices in each step


def _training(c: ConfigDict) -> None:
    """How it is trained."""
    c.noise = ConfigDict()
    c.noise.sigma_sampler = (
        "lognormal"  # lognormal, logit_normal, uniform, cosine, polynomial, discrete (the ddpm schedule)
    )
    c.noise.mean = -1.2  # of ln sigma, for lognormal and logit_normal
    c.noise.std = 1.2
    c.noise.shift = 1.0  # sigma -> shift * sigma for images `shift` times larger: training, sampling, ddpm schedule
    c.noise.assignment = "none"  # of a batch's noise to its images: none, hungarian, knn, hungarian_l2, hungarian_l1...
    c.noise.assignment_options = ConfigDict()  # groups (0 = one per device), within_class, half, exact, k, limit

    c.cond = ConfigDict()
    c.cond.padding = ""  # of text: "" (text_mask hides it), or without a mask zero, replicate, noisy (copies of tokens)
    c.cond.padding_noise = 0.02  # of noisy copies, in standard deviations of a caption's tokens

    c.optim = ConfigDict()
    c.optim.name = "adam"  # adam, adamw, adafactor, lion, radam, sgd
    c.optim.learning_rate = 1e-3
    c.optim.options = ConfigDict()  # of that optimizer, for example {"b2": 0.99}
    c.optim.clip = 0.0  # global gradient norm; 0 = off
    c.optim.warmup_images = 0  # linear warm-up
    c.optim.decay = "constant"  # constant, cosine, linear, sqrt, step
    c.optim.decay_images = 0  # where cosine and linear end, sqrt begins, step drops
    c.optim.accum_steps = 1  # slices of the batch whose gradients are averaged

    c.ema = ConfigDict()
    c.ema.kind = "half_life"  # constant, half_life, power
    c.ema.options = ConfigDict()  # decay; images, ramp; sigma_rel
    c.ema.widths = ()  # relative widths of power-function averages to store, from which `jaxdiff ema` combines others
    c.ema.snapshot_every = 0  # steps between stored averages of these widths; the last step is stored too

    c.train = ConfigDict()
    c.train.steps = 1000  # optimizer steps in total; iterations, for methods with several updates in each
    c.train.log_every = 50  # steps between log lines, and between checks for non-finite values
    c.train.sample_every = 0  # steps between sample grids; 0 = at the end only
    c.train.eval_every = 0  # steps between evaluations; 0 = none
    c.train.save_every = 500  # steps between checkpoints; the end and every stop are saved too
    c.train.on_nonfinite = "stop"  # stop at the first non-finite step, or skip it and count
    c.train.init_from = ""  # workdir, exported file or public weights whose matching parameters this run starts from
    c.train.init_kind = "run"  # run (the first two), or the kind of the weights: edm, dit, sd_unet...

    c.checkpoint = ConfigDict()
    c.checkpoint.keep = 3  # newest checkpoints kept, besides the best evaluated one
    c.checkpoint.metric = ""  # of the evaluation, smaller is better; "" = its Fréchet or sliced Wasserstein distance

    c.mesh = ConfigDict()
    c.mesh.data = -1  # devices that split the batch; -1 = all remaining ones
    c.mesh.fsdp = 1  # devices that split the batch and the parameters
    c.mesh.context = 1  # devices that split the tokens of a transformer, and the parameters
    c.mesh.tensor = 1  # devices that split attention heads and MLPs
    c.mesh.gather_first = False  # TPU: gather sharded kernels before products (undocumented options of libtpu)
    c.mesh.min_size = 16384  # parameters below this many elements are not split over fsdp


def _results(c: ConfigDict) -> None:
    """How it is sampled and measured."""
    c.sample = ConfigDict()
    c.sample.solver = "heun"
    c.sample.options = ConfigDict()  # of that solver
    c.sample.timestamps = 18  # timestamps of the grid
    c.sample.grid = "polynomial"  # polynomial, logsnr, uniform, flow, discrete (the ddpm schedule)
    c.sample.rho = 7.0  # of the polynomial grid
    c.sample.sigma_min = 0.002
    c.sample.sigma_max = 80.0
    c.sample.afs = False  # the first step is analytic and free
    c.sample.final_denoise = True  # end with x0 = D(x, sigma_min)
    c.sample.guidance = 1.0  # classifier-free guidance scale; 1 = off
    c.sample.control_guidance = 1.0  # scale of control within guidance: 0 = none, 1 = as much as the other conditions
    c.sample.control = ConfigDict()  # control metadata that samples are conditioned on; -1 = unknown
    c.sample.control.original_size = ()  # height, width; () = those of the samples
    c.sample.control.crop = (0, 0)  # top, left
    c.sample.control.flip = 0
    c.sample.control.aspect = 0.0  # width / height; 0 = that of original_size
    c.sample.average = 0.0  # relative width of an average that `jaxdiff ema` made, to sample with; 0 = the exported one
    c.sample.weak = ""  # workdir or exported file of a weaker network that guidance leads away from (autoguidance)
    c.sample.batch_size = 256  # images sampled at once
    c.sample.count = 100  # images in a grid

    c.eval = ConfigDict()
    c.eval.preset = ""  # protocol of a published number: edm, adm, pytorch_fid, clean_fid, fd_dinov2; sets net,
    #                     resize, sfid and neighbours (docs/evaluation.md)
    c.eval.net = "digits"  # feature network: digits, inception, efficientnet_lite0, dinov2; "" = sliced Wasserstein
    c.eval.weights = ""  # file with that network's weights; not needed for digits
    c.eval.resize = "bilinear"  # how images are resized for it: tensorflow (EDM, ADM), bilinear (pytorch-fid), clean
    c.eval.reference_stats = ""  # FILE.npz of feature moments (`jaxdiff stats`, or mu and sigma), instead of the data
    c.eval.sfid = False  # also the distance in spatial Inception features
    c.eval.neighbours = 5  # k of precision, recall, density and coverage
    c.eval.cache = "~/.cache/jaxdiff/features"  # reference features by image content; "" = computed each time
    c.eval.clip = ""  # a CLIP checkpoint, both encoders: score of samples and their captions, or class names
    c.eval.tokenizer = ""  # its tokenizer.json
    c.eval.clip_formula = "100cos"  # 100cos (100 max(cos, 0)) or hessel (2.5 max(cos, 0) after "A photo depicts")
    c.eval.samples = 2000
    c.eval.reference = 0  # reference images, by a fixed permutation of the dataset; 0 = all of it
    c.eval.seed = 1

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
