"""Metadata of jaxdiff.

Lower bounds are versions the test suite has passed with, all of them together: .ci/lower-bounds.txt lists them for CI.
Upper bounds stand only where a release is known to break something.
"""

from pathlib import Path

from setuptools import find_packages, setup

LIBTPU = 'libtpu>=0.0.51; platform_system == "Linux" and platform_machine == "x86_64"'  # compiles, needs no TPU

setup(
    name="jaxdiff",
    version="0.1.0",
    description="Fast diffusion models in JAX: train teachers, distil them into one-step and few-step generators",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["jaxdiff", "jaxdiff.*"]),
    package_dir={"jaxdiff.configs": "configs"},  # in a checkout they lie beside the package
    package_data={"jaxdiff": ["py.typed", "data/*.npz", "evaluation/*.npz"]},
    entry_points={"console_scripts": ["jaxdiff=jaxdiff.cli:main"]},
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10.0",
        "flax>=0.12.7",
        "array-record>=0.8.1",
        "einops>=0.8",
        "fsspec>=2025.3",
        "grain>=0.2.16",
        "jaxtyping>=0.3.7",
        "ml-collections>=1.1",
        "numpy>=2.1",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.39",
        "pillow>=11.0",
        "safetensors>=0.6.1",
        "tensorboardX>=2.6.4",
        "tqdm>=4.67",
    ],
    extras_require={
        "cuda": ["jax[cuda13]>=0.10.0"],
        "cuda12": ["jax[cuda12]>=0.10.0"],
        "tpu": ["jax[tpu]>=0.10.0"],
        "plots": ["matplotlib>=3.10"],  # features score, notebooks and experiments
        "text": ["tokenizers>=0.22.0"],
        "tfds": ["tensorflow-datasets>=4.9.10"],
        "gcs": ["gcsfs>=2025.3"],  # gs://
        "s3": ["s3fs>=2025.3"],  # s3://
        "hub": ["huggingface-hub>=0.35", "pyarrow>=19.0"],  # hf://, data.source=huggingface, jaxdiff push
        "plan": [LIBTPU],
        "wandb": ["wandb>=0.31"],
        "docs": [
            "myst-nb>=1.4",
            "sphinx>=9.0.4",
            "sphinx-book-theme>=1.4",
            "sphinx-copybutton>=0.5.2",
        ],
        "test": [
            "beartype>=0.22.2",
            "build>=1.6",
            "chex>=0.1.90",
            "huggingface-hub>=0.35",
            "ipykernel>=7.0",
            LIBTPU,
            "matplotlib>=3.10",
            "myst-nb>=1.4",  # the site is built by a test
            "nbclient>=0.10.2",
            "nbformat>=5.10",
            "pyarrow>=19.0",
            "pytest>=8.4",
            "pytest-xdist>=3.8",
            "scikit-learn>=1.6",
            "scipy>=1.15",
            "setuptools>=77.0.3",
            "sphinx>=9.0.4",
            "sphinx-book-theme>=1.4",
            "sphinx-copybutton>=0.5.2",
            "tensorflow-datasets>=4.9.10",
            "tokenizers>=0.22.0",
            "wandb>=0.31",
        ],
    },
)
