"""Every field of a config, with one comment each. Other configs change what they need and lock the result."""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"the default config takes no argument, got {arg!r}")
    c = ConfigDict()
    c.seed = 0  # of initialisation, noise and data order

    c.data = ConfigDict()
    c.data.source = (
        "digits"  # digits, shapes, creatures, arrays, latents, folder, array_records, tfds, mixture, prompts, blank
    )
    c.data.options = ConfigDict()  # of that source, as {"path": "photos"}, and of data.build, as {"flip": True}
    c.data.batch_size = 128  # global, over all devices and processes
    c.data.workers = 0  # threads that decode images; 0 = one per core

    c.model = ConfigDict()
    c.model.name = "unet"  # unet, dit, mdt, pixart, mmdit, latent_unet, mlp
    c.model.fields = ConfigDict()  # of that model; num_classes and channels follow the data when left out, and
    #                                control = {"alpha": 8.0...} takes what data.options.control records
    c.model.dtype = "float32"  # of network compute: float32 or bfloat16; parameters stay float32
    c.model.remat = ""  # activations computed again instead of kept: "" (none), full, dots, dots_no_batch

    c.denoiser = ConfigDict()
    c.denoiser.kind = "edm"  # the network's convention: edm, ddpm, flow
    c.denoiser.sigma_data = 0.5  # edm: standard deviation of the data
    c.denoiser.prediction = "eps"  # ddpm: eps, v, x0
    c.denoiser.schedule = "linear"  # ddpm: linear, sqrt_linear, cosine

    c.method = ConfigDict()
    c.method.name = "denoise"  # the training algorithm

    c.teacher = ConfigDict()  # of a distillation; it has the architecture of model.fields
    c.teacher.kind = (
        "run"  # run (a workdir), edm, dit, sd_unet... (public weights), analytic (mixture data), fresh (untrained)
    )
    c.teacher.path = ""  # that workdir, or the weights' file
    c.teacher.offload = False  # kept in the host's memory and brought to the devices in each step

    c.sfd = ConfigDict()  # Simple and Fast Distillation; the student walks the grid of `sample`
    c.sfd.nfe = (2,)  # evaluations the student is made for; several make one student for all (SFD-v)
    c.sfd.substeps = 4  # K: the teacher's steps per student step
    c.sfd.solver = "dpmpp3m"  # of the teacher
    c.sfd.solver_options = ConfigDict()
    c.sfd.loss = "l1"  # l1, l2, pseudo_huber, lpips, l1+lpips
    c.sfd.lpips = ConfigDict()
    c.sfd.lpips.weights = ""  # file of LPIPS weights, for a loss that names it
    c.sfd.lpips.net = "alex"  # alex, vgg
    c.sfd.lpips.pool = "max"  # max, avg
    c.sfd.lpips.resize = 0  # images are enlarged to this size first; 0 = not
    c.sfd.lpips.as_unit = False  # take [-1, 1] for [0, 1], as the authors' code does
    c.sfd.condition = "steps"  # what model.fields.step_embed is told: steps (how many), next (the next timestamp)
    c.sfd.dropout = True  # the student's dropout, where the model has any
    c.sfd.guidance = 1.0  # of the teacher in training, for the student to take over; 1 = guide when sampling
    c.sfd.teacher_afs = False  # second stage: the teacher's first step is analytic
    c.sfd.teacher_step = 0  # second stage: timestamps the teacher is told to walk; 0 = it has no such condition
    c.sfd.average = False  # sample an average of the parameters, as `ema` says

    c.emd = ConfigDict()  # EM Distillation; the generator is one step at the level sample.sigma_max
    c.emd.steps = 16  # K: Langevin steps of the E-step
    c.emd.scheme = "eps,z"  # what they move: eps,z or x,z or eps or x
    c.emd.step_eps = 0.16  # gamma_eps
    c.emd.step_z = 1.6e-5  # gamma_z
    c.emd.step_x = 0.0  # gamma_x of the schemes with x; 0 = gamma_eps sigma^2
    c.emd.half = False  # Langevin steps of (gamma/2, sqrt(gamma)) instead of (gamma, sqrt(2 gamma))
    c.emd.cancel = "complete"  # noise taken out of the M-step: complete, last, none
    c.emd.cancel_initial = True  # the first eps counts as such noise
    c.emd.clip_z = 0.0  # bound on the root mean square of z's drift before gamma_z; 0 = off
    c.emd.levels = ""  # noise levels of the E-step, as noise.levels; "" = those of `noise`
    c.emd.level_options = ConfigDict()  # of those levels, for example {"mean": 0.0, "std": 1.5}
    c.emd.sigma_min = 0.0  # levels of the E-step below this are raised to it: log-SNR is at most -2 ln sigma_min
    c.emd.weight = "x0"  # of |target - g(z)|^2, as noise.weight; x0 = sigma^2 on the divergence
    c.emd.score_rate = 1e-3  # learning rate of the student score; the generator's is optim.learning_rate
    c.emd.score_updates = 1  # updates of the student score before each of the generator
    c.emd.dropout = False  # of the student score while it is trained
    c.emd.guidance = 1.0  # of the teacher
    c.emd.input_scale = "sigma"  # the network sees sigma_star z, or ("one") sqrt(1 + sigma_star^2) z
    c.emd.chain_dtype = ""  # of the E-step's copies of the networks: float32 or bfloat16; "" = model.dtype, no copies
    c.emd.mcmc_sigma = 0.3  # noise level of `jaxdiff sample --mcmc_steps`

    c.consistency = ConfigDict()  # consistency models; noise.mean and noise.std say where the intervals are drawn
    c.consistency.distil = False  # along a teacher's trajectories, or from data alone
    c.consistency.solver = "heun"  # of the teacher: heun, euler
    c.consistency.guidance = 1.0  # of the teacher
    c.consistency.sigma_min = 0.002  # where the function is the identity
    c.consistency.sigma_max = 80.0
    c.consistency.rho = 7.0  # of the grid of intervals
    c.consistency.first = 10  # intervals at the beginning; they double until there are `last`
    c.consistency.last = 1280
    c.consistency.huber = 0.00054  # c of the pseudo-Huber loss, per root of the dimension
    c.consistency.target_decay = 0.0  # of an average of the parameters as target; 0 = the trained ones themselves

    c.noise = ConfigDict()
    c.noise.levels = "lognormal"  # lognormal, logit_normal, uniform, cosine, polynomial, discrete (the ddpm schedule)
    c.noise.mean = -1.2  # of ln sigma, for lognormal and logit_normal
    c.noise.std = 1.2
    c.noise.shift = 1.0  # sigma -> shift * sigma for images so many times larger: training, sampling, ddpm schedule
    c.noise.weight = "edm"  # edm, min_snr, sigmoid, flow, eps, x0
    c.noise.assignment = (
        "none"  # of a batch's noises to its images: none, hungarian, knn, hungarian_l2, hungarian_l1...
    )
    c.noise.assignment_options = ConfigDict()  # groups (0 = one a device), within_class, half, exact, k, limit

    c.cond = ConfigDict()
    c.cond.drop = 0.0  # probability that a condition is replaced by its null value in training
    c.cond.control_drop = 0.0  # the same of control, drawn apart; above 0 it can be weighed apart in guidance
    c.cond.padding = ""  # of text: "" (text_mask hides it), or without a mask zero, replicate, noisy (copies of tokens)
    c.cond.padding_noise = 0.02  # of noisy copies, in standard deviations of a text's tokens

    c.optim = ConfigDict()
    c.optim.name = "adam"  # adam, adamw, adafactor, lion, radam, sgd
    c.optim.learning_rate = 1e-3
    c.optim.options = ConfigDict()  # of that optimizer, for example {"b2": 0.99}
    c.optim.clip = 0.0  # global gradient norm; 0 = off
    c.optim.warmup_images = 0  # linear warm-up
    c.optim.decay = "constant"  # constant, cosine, linear, sqrt, step
    c.optim.decay_images = 0  # where cosine and linear end, sqrt begins, step drops
    c.optim.accumulate = 1  # slices of the batch whose gradients are averaged

    c.ema = ConfigDict()
    c.ema.kind = "half_life"  # constant, half_life, power
    c.ema.options = ConfigDict()  # decay; images, ramp; sigma_rel

    c.train = ConfigDict()
    c.train.steps = 1000  # optimizer steps in all; iterations, for methods of several updates in each
    c.train.log_every = 50  # steps between log lines, and between looks for non-finite values
    c.train.sample_every = 0  # steps between sample grids; 0 = at the end only
    c.train.eval_every = 0  # steps between evaluations; 0 = none
    c.train.save_every = 500  # steps between checkpoints; the end and every stop are saved too
    c.train.on_nonfinite = "stop"  # stop at the first non-finite step, or skip it and count
    c.train.init_from = ""  # workdir, exported file or public weights whose parameters this run starts from: what fits
    c.train.init_kind = "run"  # run (the first two), or the kind of the weights: edm, dit, sd_unet...

    c.checkpoint = ConfigDict()
    c.checkpoint.keep = 3  # newest checkpoints kept, beside the best by the evaluation's distance

    c.mesh = ConfigDict()
    c.mesh.data = -1  # devices that split the batch; -1 = all that are left
    c.mesh.fsdp = 1  # devices that split the batch and the parameters
    c.mesh.tensor = 1  # devices that split attention heads and MLPs
    c.mesh.min_size = 16384  # parameters below this many elements are not split over fsdp

    c.sample = ConfigDict()
    c.sample.solver = "heun"
    c.sample.options = ConfigDict()  # of that solver
    c.sample.steps = 18  # timestamps of the grid
    c.sample.grid = "polynomial"  # polynomial, logsnr, uniform, flow, discrete (the ddpm schedule)
    c.sample.rho = 7.0  # of the polynomial grid
    c.sample.sigma_min = 0.002
    c.sample.sigma_max = 80.0
    c.sample.afs = False  # the first step is analytic and free
    c.sample.to_zero = True  # end with x0 = D(x, sigma_min)
    c.sample.guidance = 1.0  # classifier-free guidance scale; 1 = off
    c.sample.control_guidance = 1.0  # of control within it: 0 = none of it, 1 = as much as the other conditions
    c.sample.control = ConfigDict()  # what a model with control is told of its samples; -1 = nothing
    c.sample.control.original_size = ()  # height, width; () = those of the samples
    c.sample.control.crop = (0, 0)  # top, left
    c.sample.control.flip = 0
    c.sample.control.aspect = 0.0  # width / height; 0 = that of original_size
    c.sample.batch_size = 256  # images sampled at once
    c.sample.count = 100  # images in a grid

    c.eval = ConfigDict()
    c.eval.net = "digits"  # feature network: digits, efficientnet_lite0, inception; "" = sliced Wasserstein on pixels
    c.eval.weights = ""  # where that network's weights are; not needed for digits
    c.eval.clip = ""  # a CLIP checkpoint, both halves: the score of samples and their captions, or names of classes
    c.eval.tokenizer = ""  # its tokenizer.json
    c.eval.samples = 2000
    c.eval.reference = 0  # reference images; 0 = the whole data set
    c.eval.seed = 1

    c.autoencoder = ConfigDict()  # that samples are decoded by, where the data are latents
    c.autoencoder.kind = ""  # sd_vae, sdxl_vae, taesd; "" = samples stay as they are
    c.autoencoder.path = ""  # the weights' file
    c.autoencoder.options = ConfigDict()  # what the file does not tell, for example {"scale": 0.18215}

    c.curriculum = ConfigDict()  # stages by name, each with its changes to this config (training/curriculum.py)

    c.compile_cache = "~/.cache/jaxdiff"  # compiled programs are kept here between runs; "" = off
    return c
