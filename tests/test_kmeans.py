"""Laws of features from the hub and of k-means: windows are the whole, shares of a corpus agree on their centres."""

import socket
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from saved import make_corpus, noise, run, save_model

from vadusa_jax.speech import BadAudio, load_codec, read_audio
from vadusa_jax.speech import huggingface as hub
from vadusa_jax.speech.kmeans import Centres, KmeansCodec, fit, merge

SSL = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
FEATURES = {
    "hubert": hf.HubertConfig(**SSL),
    "wav2vec2": hf.Wav2Vec2Config(**SSL),
    "wavlm": hf.WavLMConfig(**SSL, do_stable_layer_norm=True, feat_extract_norm="layer"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A saved model of every kind."""
    root = tmp_path_factory.mktemp("hub")
    for kind, config in FEATURES.items():
        save_model(root, kind, config)
        hf.Wav2Vec2FeatureExtractor(do_normalize=kind != "wavlm").save_pretrained(root / kind)
    return {kind: root / kind for kind in FEATURES}


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


def test_features_that_cannot_be_used_are_named(folders):
    with pytest.raises(ValueError, match="layer 4 of a model with 3 layers"):
        hub.HubFeatures.fetch(str(folders["hubert"]), 4)
    with pytest.raises(ValueError, match=r"kind 'hubert', here .*'encodec'.* can be used"):
        hub.HubCodec.fetch(str(folders["hubert"]), 1)


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
