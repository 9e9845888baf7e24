"""Packaging: the rooms become `oprd.core`, `oprd.kernels`, ... and never top-level packages (see oprd.py)."""

from setuptools import setup

ROOMS = ("core", "parallel", "kernels", "rollout", "sandbox")
PARQUET = ["pyarrow>=15"]
TEST = ["pytest>=8", "pytest-timeout", "triton>=3.3", "transformers>=5.2", "docker>=7", *PARQUET]

setup(
    name="oprd",
    version="0.1.0",
    description="On-Policy Reminder Distillation: post-training for coding agents",
    python_requires=">=3.11",
    packages=[f"oprd.{room}" for room in ROOMS],
    package_dir={f"oprd.{room}": room for room in ROOMS},
    package_data={"oprd.rollout": ["*.toml"]},
    # torch is pinned: the CPU build of this very version is what the tests' bit-exactness was measured with.
    install_requires=["torch==2.13.0", "safetensors>=0.5", "tokenizers>=0.21", "numpy>=1.26", "pydantic>=2.7",
                      "tensorboard>=2.17", "tqdm>=4.66", "jinja2>=3.1.6"],
    extras_require={
        "gpu": ["triton>=3.3", "flash-attn>=2.7", "flash-linear-attention>=0.3"],
        "sglang": ["sglang>=0.5.20"],
        "docker": ["docker>=7"],
        "parquet": PARQUET,
        "test": TEST,
    },
)
