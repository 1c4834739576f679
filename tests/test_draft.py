"""Laws of drafters: whoever drafts, `exact` says what plain decoding says, and memory keeps in step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import BATCH, DECODE, HEADS, MODEL, SLOTS, check_counts, random_prompts, random_tree, said, speak, toy_model

from vadusa_jax.config import ModelConfig
from vadusa_jax.decode.accept import EXACT, Greedy, Ssd, Tolerance, Unverified
from vadusa_jax.decode.draft import MEDUSA, Context, DraftLM, Viterbi, head_drafter
from vadusa_jax.decode.loop import prefill
from vadusa_jax.decode.prompts import make_prompts, make_settings
from vadusa_jax.decode.transitions import count_transitions, load_transitions, save_transitions
from vadusa_jax.decode.tree import Tree, TreeError, chain
from vadusa_jax.model.heads import SpeechLM

ONE = dataclasses.replace(MODEL, layers=1)  # drafters do not see the layers
SMALL = dataclasses.replace(MODEL, layers=1, width=16, attention_heads=2, ffn=24)
HYDRA = dataclasses.replace(HEADS, kind="hydra")


def prompts(seed: int, limit: int = 40):
    return make_prompts(random_prompts(np.random.default_rng(seed)), [limit] * BATCH, range(BATCH), seed, DECODE)


@pytest.fixture(scope="module")
def lm() -> SpeechLM:
    return toy_model(model=ONE)


@pytest.fixture(scope="module")
def hydra() -> SpeechLM:
    return toy_model(model=ONE, heads=HYDRA)


@pytest.fixture(scope="module")
def small() -> DraftLM:
    return DraftLM(toy_model(3, model=SMALL).backbone)


TREES = [chain(4), random_tree(7, 12)]


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_every_drafter_says_what_plain_decoding_says(lm, hydra, small, seed):
    plain, plain_hydra = said(speak(lm, prompts(seed))), said(speak(hydra, prompts(seed)))
    assert plain == plain_hydra  # the heads have no say in it
    for tree in TREES:
        assert said(speak(lm, prompts(seed), tree)) == plain
        assert said(speak(hydra, prompts(seed), tree)) == plain
    assert said(speak(lm, prompts(seed), chain(3), drafter=small)) == plain
    greedy = said(speak(lm, prompts(seed), rule=Greedy()))
    assert said(speak(lm, prompts(seed), chain(3), Greedy(), drafter=small)) == greedy
    assert said(speak(hydra, prompts(seed), TREES[1], Greedy())) == greedy


def test_a_model_that_drafts_for_itself_is_always_right(lm):
    rows = speak(lm, prompts(0), chain(4), drafter=DraftLM(lm.backbone))
    assert said(rows) == said(speak(lm, prompts(0)))
    for row in rows:  # the prefill says one token, every step five
        assert row.passes == 1 + -(-(len(row.tokens) - 1) // 5)


def test_sequential_heads_grow_each_node_from_its_own_path(hydra):
    """Every guess against a forward pass of the heads along that one path."""
    tree, batch = random_tree(5, 14), 3
    rng = np.random.default_rng(0)
    h_BD = jnp.asarray(rng.standard_normal((batch, MODEL.width)), jnp.float32)
    root_B = jnp.asarray(rng.integers(0, MODEL.output_vocab, batch))
    noise = jnp.zeros((batch, 5, 0, MODEL.output_vocab))
    at = Context(h_BD, root_B, jnp.zeros((batch,), int), lambda logits, *_: jax.nn.log_softmax(logits), noise, 0)
    drafted_BT, log_q, memory = head_drafter(hydra).draft(hydra, None, tree, None, at)
    token_BT = np.concatenate([np.asarray(root_B)[:, None], np.asarray(drafted_BT)], axis=1)
    assert log_q is None and memory is None
    for i in range(1, len(tree)):
        z_BD = h_BD
        for depth, node in enumerate(tree.path_TJ[i][: tree.depth_T[i]], start=1):
            embedded_BD = hydra.backbone.embed(jnp.asarray(token_BT[:, [node]]))[:, 0]
            z_BD, logits_BV = hydra.heads.follow(depth, z_BD, embedded_BD)
        ranked_BV = np.argsort(-np.asarray(logits_BV), axis=-1, kind="stable")
        np.testing.assert_array_equal(token_BT[:, i], ranked_BV[:, tree.rank_T[i]])


def test_a_new_sequential_head_is_its_output_matrix():
    fresh = SpeechLM(MODEL, HYDRA, rngs=nnx.Rngs(0))
    h_BD = jax.random.normal(jax.random.key(0), (2, MODEL.width))
    for k, logits_BV in enumerate(fresh.heads.each(h_BD, lambda k: h_BD), start=1):
        np.testing.assert_allclose(logits_BV, h_BD @ fresh.heads.output[k - 1], rtol=1e-5, atol=1e-6)


# draft language model and SSD


def test_ssd_speaks_with_the_distribution_of_the_model():
    """The first three tokens of many sequences against the model's own probabilities of each such sequence."""
    tiny = ModelConfig(speech_vocab=4, text_vocab=3, layers=1, width=16, attention_heads=2, ffn=16, max_length=64)
    lm, drafter = toy_model(0, model=tiny), DraftLM(toy_model(1, model=tiny).backbone)
    decode, many, rows = dataclasses.replace(DECODE, temperature=1.0, top_k=0, top_p=1.0), 6000, []
    for seed in range(many // 15):  # few rows at a time: each is written into the cache by code of its own
        batch = make_prompts([[5, 6]] * 15, [3] * 15, range(15), seed, decode)
        rows += speak(lm, batch, chain(2), Ssd(0.0), decode=decode, drafter=drafter, slots=8)
    accepted = sum(len(row.tokens) for row in rows) / sum(row.passes for row in rows)
    assert accepted > 1.05  # the drafts did have a say: 1.5 at most, with a prefill and two tokens more

    log_p = {}
    for length in range(3):
        for begin in itertools.product(range(4), repeat=length):  # 4 is EOS: nothing follows
            tokens_1T = jnp.asarray([[5, 6, *begin]])
            count = tokens_1T.shape[1]
            h_1TD, _ = lm.backbone(tokens_1T, jnp.arange(count)[None], jnp.tril(jnp.ones((1, count, count), bool)))
            log_p[begin] = np.asarray(jax.nn.log_softmax(lm.backbone.logits(h_1TD)[0, -1]), np.float64)
    outcomes = [(4,), *((a, 4) for a in range(4)), *((a, b, c) for a in range(4) for b in range(4) for c in range(5))]
    p = np.array([np.exp(sum(log_p[o[:i]][o[i]] for i in range(len(o)))) for o in outcomes])
    assert p.sum() == pytest.approx(1.0, abs=1e-5)
    often = p > 5 / many
    index = {o: i for i, o in enumerate(outcomes)}
    seen = np.bincount([index[row.tokens] for row in rows], minlength=len(p))
    check_counts(
        np.repeat(np.arange(often.sum() + 1), [*seen[often], seen[~often].sum()]), np.append(p[often], p[~often].sum())
    )


def test_what_does_not_fit_together_is_named(lm, small):
    def begin(tree: Tree, rule, drafter, model=lm):
        prefill(model, prompts(0), settings=make_settings(tree, rule, DECODE), slots=SLOTS, drafter=drafter)

    with pytest.raises(ValueError, match=r"ssd:beta=0 needs a drafter that draws"):
        begin(chain(2), Ssd(0.0), MEDUSA)
    with pytest.raises(TreeError, match="DraftLM drafts a chain, the tree branches"):
        begin(random_tree(7, 12), EXACT, small)
    with pytest.raises(TreeError, match="needs 5 draft heads, the model has 4"):
        begin(chain(5), EXACT, MEDUSA)
    other = DraftLM(toy_model(model=dataclasses.replace(MODEL, speech_vocab=7)).backbone)
    with pytest.raises(TreeError, match="scores 8 tokens, the model 20"):
        begin(chain(2), EXACT, other)


# Viterbi


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_viterbi_finds_the_likeliest_of_all_paths(lm, seed):
    rng, vocab, depth = np.random.default_rng(seed), MODEL.output_vocab, 3
    log_A_VV = np.log(rng.dirichlet(np.full(vocab, 0.3), vocab) + 1e-9).astype(np.float32)
    h_BD, root_B = jnp.asarray(rng.standard_normal((2, MODEL.width)), jnp.float32), jnp.asarray([1, 2])
    noise = jnp.asarray(rng.gumbel(size=(2, depth, 1, vocab)), jnp.float32)
    at = Context(h_BD, root_B, jnp.zeros((2,), int), lambda logits, *_: jax.nn.log_softmax(logits), noise, 1)
    drafter = Viterbi(jnp.asarray(log_A_VV), width=5)
    found_BD, _, _ = drafter.draft(lm, drafter.prepare(lm, chain(depth)), chain(depth), None, at)
    score_BDV = np.asarray(jax.nn.log_softmax(lm.heads(h_BD, depth)) + noise[:, :, 0])
    for b in range(2):
        wide = [np.argsort(-score_BDV[b, d])[:5] for d in range(depth)]

        def total(path, b=b):
            steps = zip((int(root_B[b]), *path), path, strict=False)
            return sum(score_BDV[b, d, t] for d, t in enumerate(path)) + sum(log_A_VV[s, t] for s, t in steps)

        best = max(total(path) for path in itertools.product(*wide))
        assert total(found_BD[b].tolist()) == pytest.approx(best, abs=1e-4)


def test_viterbi_says_a_token_of_every_head_at_every_step(lm):
    uniform = Viterbi(jnp.zeros((MODEL.output_vocab, MODEL.output_vocab)), width=8)
    for row in speak(lm, prompts(1), chain(4), Unverified(), drafter=uniform):
        assert row.passes == 1 + -(-(len(row.tokens) - 1) // 5)
        assert MODEL.eos not in row.tokens[:-1]


def test_transitions_are_counted_and_kept(tmp_path):
    log_p_VV = count_transitions([np.array([0, 1, 0, 1, 2]), np.array([1, 2])], vocab=3)
    np.testing.assert_allclose(np.exp(log_p_VV).sum(axis=1), 1, rtol=1e-5)
    assert np.exp(log_p_VV[0, 1]) > 0.98 and np.exp(log_p_VV[1, 2]) == pytest.approx(2 / 3, abs=0.01)
    assert load_transitions(tmp_path) is None
    save_transitions(tmp_path, log_p_VV)
    np.testing.assert_allclose(load_transitions(tmp_path), log_p_VV, rtol=1e-3, atol=1e-3)


def test_tolerance_with_a_draft_model_only_gets_faster(lm, small):
    exact, wide = (speak(lm, prompts(2), chain(3), rule, drafter=small) for rule in (EXACT, Tolerance(4)))
    rate = [sum(len(row.tokens) for row in rows) / sum(row.passes for row in rows) for rows in (exact, wide)]
    assert rate[1] > rate[0]
