"""Laws of codecs from the hub, on tiny random models saved to disk and read by the real code."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from saved import make_corpus, noise, run, save_model

from vadusa_jax.model.nar import fill as fill_in
from vadusa_jax.model.nar import load_nar
from vadusa_jax.speech import BadAudio, load_codec
from vadusa_jax.speech import huggingface as hub

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A saved model of every kind."""
    root = tmp_path_factory.mktemp("hub")
    return {kind: save_model(root, kind, config) for kind, (config, _) in CODECS.items()}


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
    with pytest.raises(ValueError, match=r"kind 'dac', here .*'wavlm'.* can be used"):
        hub.HubFeatures.fetch(str(folders["dac"]), 1)
    with pytest.raises(ValueError, match="has 3 codebooks, not 4"):
        hub.HubCodec.fetch(str(folders["dac"]), 4)
    hf.EncodecModel(hf.EncodecConfig(**SEANET, codebook_size=64, audio_channels=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="2 channels: only mono"):
        hub.HubCodec.fetch(str(tmp_path), 1)


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
