"""Methods built from keyword arguments, each given to the options, the sampling or the parts that have it."""

import dataclasses

from jaxdiff import denoisers
from jaxdiff.conditions import Conditions, label_signal
from jaxdiff.methods import Frozen, Parts, Sampling, Teacher, optimizers
from jaxdiff.methods.sfd import teacher_model
from jaxdiff.models import bind, conditioning

EDM = denoisers.edm


def take(kind, options):
    """An instance of a dataclass from those of the options that it has, which are removed."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in options]
    return kind(**{name: options.pop(name) for name in names})


def build_method(module, model, optimizer, score=None, *, null=None, teacher=None, analytic=None, **options):
    """`module.build`. The teacher is of the model's own network unless `analytic`, a denoiser, or `teacher` is given.

    null = {"label": n} makes the network's null label n; `decay` is that of the average, which some options ask for by
    the same name; `sampling_guidance` that of samples, `guidance` the teacher's.
    """
    convention = options.pop("convention", EDM)
    conditions = Conditions(conditioning.signals(model))
    if null:
        conditions["label"] = label_signal(null["label"])
    decay, guidance = options.pop("decay", None), options.pop("sampling_guidance", 1.0)
    factor = options.pop("factor", lambda iteration: 1.0)
    perceptual = {"perceptual": options.pop("perceptual")} if "perceptual" in options else {}
    chosen, sampling = take(module.Options, options), take(Sampling, options)
    sampling = dataclasses.replace(sampling, guidance=guidance)
    if decay is not None:
        options["average"] = decay
    if analytic is not None:
        teacher = Teacher(lambda params: analytic, Frozen(dict, dict), own=False)
    elif teacher is None and getattr(chosen, "distil", not module.__name__.endswith("diffusion")):
        network = teacher_model(model, getattr(chosen, "teacher_step", 0))
        teacher = Teacher(lambda params: convention(bind(network, params)), Frozen(dict, dict), own=True)
    updates = dataclasses.replace(optimizers(optimizer, score), factor=factor)
    parts = Parts(model, updates, convention, conditions, sampling, teacher=teacher, **options)
    return module.build(chosen, parts, **perceptual)
