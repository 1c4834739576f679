"""Laws of codecs from the hub and of k-means, on tiny random models saved to disk and read by the real code."""

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers as hf

from vadusa_jax.model.nar import fill as fill_in
from vadusa_jax.model.nar import load_nar
from vadusa_jax.speech import BadAudio, load_codec, read_audio
from vadusa_jax.speech import huggingface as hub
from vadusa_jax.speech.kmeans import Centres, KmeansCodec, fit, merge

SEANET = {"num_filters": 4, "hidden_size": 16, "num_lstm_layers": 1, "compress": 2}
SEMANTIC = {
    "model_type": "wav2vec2-bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "feature_projection_input_dim": 160,
}  # fmt: skip
XCODEC = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "encoder_hidden_size": 2, "quantization_dim": 80,
    "quantization_levels": [4, 4, 4], "semantic_model_config": SEMANTIC,
}  # fmt: skip
CODECS = {  # kind -> (config, samples of one token as they come out)
    "encodec": (hf.EncodecConfig(**SEANET, codebook_size=64, target_bandwidths=[0.9, 1.8]), 320),
    "dac": (
        hf.DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, n_codebooks=3, codebook_size=64, codebook_dim=4),
        512,
    ),
    "mimi": (
        hf.MimiConfig(
            num_filters=4, hidden_size=16, codebook_size=64, codebook_dim=8, num_quantizers=3, upsample_groups=16,
            vector_quantization_hidden_dimension=8, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2,
            num_key_value_heads=2,
        ),
        1920,
    ),
    "wavtokenizer": (
        hf.WavTokenizerConfig(
            **SEANET, codebook_size=64, codebook_dim=16, decoder_hidden_size=64, decoder_intermediate_size=32,
            decoder_num_layers=1,
        ),
        600,
    ),
    "xcodec2": (hf.Xcodec2Config(**XCODEC), 320),
    "neucodec": (hf.NeuCodecConfig(**XCODEC), 480),
}  # fmt: skip
SSL = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
FEATURES = {
    "hubert": hf.HubertConfig(**SSL),
    "wav2vec2": hf.Wav2Vec2Config(**SSL),
    "wavlm": hf.WavLMConfig(**SSL, do_stable_layer_norm=True, feat_extract_norm="layer"),
}


def noise(samples: int, seed: int = 0) -> np.ndarray:
    """Noise that swells and falls, so that its tokens differ."""
    swell = np.abs(np.sin(np.arange(samples) / 3000)) + 0.01
    return (0.3 * swell * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


@torch.no_grad()
def awaken(model: torch.nn.Module) -> None:
    """Untrained models say one token for everything; with louder weights they do not."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim > 1 and "decoder" not in name:
            parameter.mul_(1000 if "project_in" in name else 2)
    for name, buffer in model.named_buffers():
        if name.endswith(("embed", "embed_sum")):  # codebooks of zeros
            buffer.normal_()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A saved model of every kind."""
    root = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    for kind, config in ({kind: config for kind, (config, _) in CODECS.items()} | FEATURES).items():
        model = hf.AutoModel.from_config(config)
        awaken(model)
        model.save_pretrained(root / kind)
        if kind in FEATURES:
            hf.Wav2Vec2FeatureExtractor(do_normalize=kind != "wavlm").save_pretrained(root / kind)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="module", params=CODECS)
def codec(request, folders) -> hub.HubCodec:
    kind = request.param
    return hub.HubCodec.fetch(str(folders[kind]), codebooks=1 if hub.PUBLISHED[kind].codebooks == 1 else 2)


def test_published_facts_are_those_of_the_default_configs():
    for kind, facts in hub.PUBLISHED.items():
        config = hf.AutoConfig.for_model(kind)
        if not facts.vocab_size:
            assert np.prod(config.conv_stride) * facts.frame_rate == facts.sample_rate
            continue
        levels = getattr(config, "quantization_levels", None)
        assert facts.vocab_size == (np.prod(levels) if levels else config.codebook_size)
        assert facts.sample_rate == (getattr(config, "output_sampling_rate", 0) or config.sampling_rate)
        assert kind == "dac" or facts.codebooks == hub._codebooks(config)  # DAC has other weights at each rate


def test_tokens_and_sound_have_the_lengths_and_ranges_of_the_protocol(codec):
    hop = CODECS[codec.model.config.model_type][1]
    for samples in (hop, 5 * hop + 1, 20 * hop):
        tokens_QT = codec.encode_all(noise(samples))
        assert tokens_QT.dtype == np.int32 and tokens_QT.shape == (codec.codebooks, -(-samples // hop))
        assert 0 <= tokens_QT.min() <= tokens_QT.max() < codec.vocab_size == 64
        assert (codec.encode(noise(samples)) == tokens_QT[0]).all()
        for wave_P in (codec.decode(tokens_QT[0]), codec.decode_all(tokens_QT)):
            assert wave_P.dtype == np.float32 and len(wave_P) == tokens_QT.shape[1] * hop
            assert np.isfinite(wave_P).all()
    assert len(np.unique(tokens_QT)) > 4
    assert codec.decode(np.zeros(0, np.int32)).shape == (0,)
    assert round(codec.sample_rate / codec.frame_rate) == hop


def test_a_batch_of_windows_is_each_alone(codec):
    hop = round(codec._input_rate / codec.frame_rate)
    waves_BP = np.stack([noise(30 * hop, seed) for seed in range(3)])
    together = codec.codes(waves_BP, codec.codebooks)
    alone = np.concatenate([codec.codes(wave_P[None], codec.codebooks) for wave_P in waves_BP])
    assert (together == alone).mean() > 0.99  # a code at the border between two may fall to either side
    np.testing.assert_allclose(
        codec.waves(alone.astype(np.int64)),
        np.concatenate([codec.waves(codes_QT[None].astype(np.int64)) for codes_QT in alone]),
        atol=1e-4,
    )


def test_long_audio_in_windows_is_nearly_the_whole(codec, monkeypatch):
    seconds = 6 if codec.model.config.model_type != "mimi" else 12
    wave_P = noise(seconds * codec.sample_rate)
    whole_T = codec.encode(wave_P)
    monkeypatch.setattr(hub, "WINDOW_S", 3 * codec.receptive_field / codec.frame_rate)
    parts_T = codec.encode(wave_P)
    assert len(parts_T) == len(whole_T)
    # What normalises or attends over the whole utterance cannot agree exactly.
    exact = codec.model.config.model_type in ("dac", "wavtokenizer", "encodec", "mimi")
    assert (parts_T == whole_T).mean() > (0.99 if exact else 0.6)


@pytest.mark.parametrize(
    ("wave", "fault"),
    [
        (np.zeros(0), "no samples"),
        (np.full(48_000, np.nan), "48000 samples are NaN"),
        (np.zeros(100), "at least"),
    ],
)
def test_bad_audio_is_named_and_silence_is_no_fault(codec, wave, fault):
    with pytest.raises(BadAudio, match=fault):
        codec.encode(wave)
    silence = codec.encode(np.zeros((codec.sample_rate, 2)))  # stereo as well
    assert np.isfinite(codec.decode(silence)).all()


def test_foreign_tokens_are_refused(codec):
    with pytest.raises(ValueError, match=r"not all in 0\.\.63"):
        codec.decode(np.array([3, 64]))
    with pytest.raises(ValueError, match=r"got \(9, 5\)"):
        codec.decode_all(np.zeros((9, 5), np.int64))


def test_a_saved_codec_is_the_same_without_the_hub(codec, tmp_path):
    codec.save(tmp_path / "codec")
    again, wave_P = load_codec(tmp_path / "codec"), noise(codec.sample_rate)
    assert json.loads((tmp_path / "codec" / "codec.json").read_text())["codec"] == "hub"
    tokens_QT = codec.encode_all(wave_P)
    assert (again.encode_all(wave_P) == tokens_QT).all()
    assert (again.decode_all(tokens_QT) == codec.decode_all(tokens_QT)).all()


def test_what_cannot_be_used_is_named(folders, tmp_path):
    with pytest.raises(ValueError, match=r"kind 'hubert', here .*'encodec'.* can be used"):
        hub.HubCodec.fetch(str(folders["hubert"]), 1)
    with pytest.raises(ValueError, match=r"kind 'dac', here .*'wavlm'.* can be used"):
        hub.HubFeatures.fetch(str(folders["dac"]), 1)
    with pytest.raises(ValueError, match="has 3 codebooks, not 4"):
        hub.HubCodec.fetch(str(folders["dac"]), 4)
    with pytest.raises(ValueError, match="layer 4 of a model with 3 layers"):
        hub.HubFeatures.fetch(str(folders["hubert"]), 4)
    hf.EncodecModel(hf.EncodecConfig(**SEANET, codebook_size=64, audio_channels=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="2 channels: only mono"):
        hub.HubCodec.fetch(str(tmp_path), 1)


# features and k-means


@pytest.fixture(scope="module", params=FEATURES)
def features(request, folders) -> hub.HubFeatures:
    return hub.HubFeatures.fetch(str(folders[request.param]), layer=2)


def test_features_are_those_of_the_layer_centred_on_their_frames(features, folders):
    kind = features.model.config.model_type
    wave_P = noise(16_000)
    frame_TD = features.extract(wave_P)
    assert frame_TD.shape == (50, 16) and frame_TD.dtype == np.float32
    assert features.extract(wave_P[:15_999]).shape == (50, 16) and features.extract(wave_P[:15_680]).shape == (49, 16)
    whole = hf.AutoModel.from_pretrained(folders[kind]).eval()
    prepared = hf.AutoFeatureExtractor.from_pretrained(folders[kind])(wave_P, sampling_rate=16_000)["input_values"][0]
    with torch.inference_mode():
        states = whole(torch.from_numpy(np.pad(prepared, 40))[None], output_hidden_states=True).hidden_states
    np.testing.assert_allclose(frame_TD, states[2][0].numpy(), atol=1e-4)


def test_features_in_windows_are_nearly_those_of_the_whole(features, monkeypatch):
    wave_P = noise(16_000 * 13)
    whole_TD = features.extract(wave_P)
    monkeypatch.setattr(hub, "WINDOW_S", 6.0)
    parts_TD = features.extract(wave_P)
    assert parts_TD.shape == whole_TD.shape
    assert np.abs(parts_TD - whole_TD).mean() < 0.1 * np.abs(whole_TD).mean()
    waves_BP = np.stack([noise(32_000, seed) for seed in range(2)])
    alone = [features.states(wave_P[None])[0] for wave_P in waves_BP]
    np.testing.assert_allclose(features.states(waves_BP), alone, atol=1e-4)


def blobs(seed: int, count: int = 4000) -> np.ndarray:
    """Points around the corners of a cube."""
    rng = np.random.default_rng(seed)
    return (4.0 * rng.integers(0, 2, (count, 3)) + 0.2 * rng.standard_normal((count, 3))).astype(np.float32)


def is_cube(centres: Centres) -> bool:
    corners = {tuple(corner) for corner in np.round(centres.centre_KD / 4).astype(int).tolist()}
    return len(corners) == len(centres.centre_KD) == 8 and np.abs(centres.centre_KD % 4 - 2).min() > 1.8


def test_clusters_are_found_and_shares_of_a_corpus_agree_on_them():
    shares = [fit(np.array_split(blobs(seed), 7), 8, seed=0) for seed in range(3)]
    merged = merge(shares)
    assert all(map(is_cube, [*shares, merged]))
    assert merged.count_K.sum() == pytest.approx(12_000)
    again = merge([fit(np.array_split(blobs(seed), 7), 8, seed=0) for seed in range(3)])
    assert (again.centre_KD == merged.centre_KD).all()
    frame_TD = blobs(9, 100)
    distance_TK = np.square(frame_TD[:, None] - merged.centre_KD).sum(axis=-1)
    assert (merged.nearest(frame_TD) == distance_TK.argmin(axis=1)).all()


def test_too_little_speech_for_the_clusters_is_named():
    with pytest.raises(ValueError, match="5 frames cannot make 8 clusters"):
        fit([blobs(0, 5)], 8)
    with pytest.raises(ValueError, match="no frames"):
        fit([], 8)


def test_kmeans_tokens_survive_saving_and_do_not_decode(features, tmp_path):
    wave_P = noise(32_000)
    with warnings.catch_warnings(action="ignore"):
        codec = KmeansCodec(features, fit([features.extract(wave_P)], 12))
    codec.save(tmp_path / "codec")
    again = load_codec(tmp_path / "codec")
    tokens_T = codec.encode(wave_P)
    assert (again.encode(wave_P) == tokens_T).all() and len(tokens_T) == 100
    assert (again.vocab_size, again.frame_rate, again.sample_rate) == (12, 50.0, 16_000)
    assert len(np.unique(tokens_T)) > 3
    with pytest.raises(ValueError, match="train_codec sound"):
        again.decode(tokens_T)
    with pytest.raises(BadAudio, match=r"at least 0\.02 s"):
        again.encode(noise(319))


# the command


def make_corpus(root: Path, count: int = 6) -> Path:
    for i in range(count):
        folder = root / "train" / "s" / "c"
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / f"s_c_{i}.wav", noise(16_000, seed=i), 16_000)
        (folder / f"s_c_{i}.normalized.txt").write_text("Hello there.")
    return root


def run(*args: object, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vadusa_jax.train_codec", *map(str, args)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_share_the_corpus_and_agree_on_the_centres(folders, tmp_path):
    corpus = make_corpus(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    args = ["kmeans", "--model", folders["hubert"], "--layer", 1, "--clusters", 8, "--corpus", corpus]
    args += ["--hours", 4 / 3600]
    runs = [
        run(
            *args, "--out", tmp_path / "codec", JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i), XLA_FLAGS="",
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240) for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    assert "layer 1, 200 frames" in outputs[0][0] and "centres" not in outputs[1][0]
    codec = load_codec(tmp_path / "codec")
    features = hub.HubFeatures.fetch(str(folders["hubert"]), 1)
    waves = [read_audio(path, 16_000) for path in sorted(corpus.rglob("*.wav"))]
    shares = [fit(map(features.extract, waves[i:4:2]), 8) for i in range(2)]  # four of the six seconds, two each
    np.testing.assert_allclose(codec.centres.centre_KD, merge(shares).centre_KD, atol=1e-5)


@pytest.mark.slow
def test_the_command_takes_a_codec_trains_its_stage_and_says_what_it_needs(folders, tmp_path):
    hub.HubCodec.fetch(str(folders["mimi"]), codebooks=2).save(tmp_path / "codec")
    outputs = []
    for process, code in (
        (run("hub", "--model", folders["mimi"], "--codebooks", 2, "--out", tmp_path / "same"), 0),
        (
            run(
                *("codebooks", "--codec", tmp_path / "codec", "--corpus", make_corpus(tmp_path)),
                *("--steps", 2, "--depth", 1, "--width", 64, "--out", tmp_path / "nar"),
            ),
            0,
        ),
        (run("kmeans", "--model", "hubert", "--out", tmp_path / "none"), 1),
        (run("--corpus", tmp_path, "--out", tmp_path / "codec"), 1),
    ):
        outputs.append("".join(process.communicate(timeout=120)))
        assert process.returncode == code, outputs[-1]
    assert "6 utterances" in outputs[1] and "kmeans needs --corpus" in outputs[2]
    assert "holds a HubCodec, a FsqCodec is asked: give another --out" in outputs[3]
    assert not (tmp_path / "none").exists()
    codec, tokens_T = load_codec(tmp_path / "same"), load_codec(tmp_path / "codec").encode(noise(24_000))
    assert codec.codebooks == 2 and (codec.encode(noise(24_000)) == tokens_T).all()
    filled_QT = fill_in(load_nar(tmp_path / "nar"), [np.array([5, 6])], [tokens_T])[0]
    assert filled_QT.shape == (2, 13) and len(codec.decode_all(filled_QT)) == 13 * 1920
