"""Metadata of jaxdiff. Lower bounds are versions the test suite has passed with."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="jaxdiff",
    version="0.1.0",
    description="Fast diffusion models in JAX: train teachers, distil them into one-step and few-step generators",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["jaxdiff", "jaxdiff.*"]),  # jaxdiff/configs is a link to configs/
    package_data={"jaxdiff": ["py.typed", "evaluation/*.npz"]},
    entry_points={"console_scripts": ["jaxdiff=jaxdiff.cli:main"]},
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10.0",
        "flax>=0.12.7",
        "absl-py>=2.3",
        "array-record>=0.8.1",
        "einops>=0.8",
        "grain>=0.2.16",
        "jaxtyping>=0.3.7",
        "matplotlib>=3.10",
        "ml-collections>=1.1",
        "numpy>=2.1",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.39",
        "pillow>=11.0",
        "safetensors>=0.6.1",
        "scikit-learn>=1.6",
        "scipy>=1.15",
        "tensorboardX>=2.6.4",
        "tensorflow-datasets>=4.9.10",
        "tqdm>=4.67",
    ],
    extras_require={
        "cuda": ["jax[cuda12]>=0.10.0"],
        "tpu": ["jax[tpu]>=0.10.0"],
        "text": ["tokenizers>=0.22.0"],
        "test": [
            "beartype>=0.22.2",
            "chex>=0.1.90",
            "ipykernel>=7.0",
            'libtpu>=0.0.51; platform_system == "Linux" and platform_machine == "x86_64"',  # compiles, needs no TPU
            "mypy>=1.18",
            "nbclient>=0.10.2",
            "nbformat>=5.10",
            "pytest>=8.4",
            "pytest-xdist>=3.8",
            "ruff>=0.14",
            "tokenizers>=0.22.0",
        ],
    },
)
