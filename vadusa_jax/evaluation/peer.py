"""The same decoder in another implementation: LLaMA in Hugging Face transformers (extra `[bench]`), to compare with."""

import os
import time
from collections.abc import Callable

import jax
import numpy as np

from vadusa_jax.config import DecodeConfig, ModelConfig
from vadusa_jax.decode.state import Prompts
from vadusa_jax.evaluation.speed import PeerRun


def transformers_peer(model: ModelConfig, decode: DecodeConfig, dtype: str) -> Callable[[Prompts], PeerRun]:
    """`LlamaForCausalLM.generate` with random weights of the same shape, same sampling and as many threads.

    The function that comes back has every row of a batch say exactly `limit_B` tokens, the same for all rows. The
    vocabulary is that of our LM head, so that both score as many tokens.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    on = "cuda" if jax.devices()[0].platform == "gpu" and torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=model.output_vocab,
        hidden_size=model.width,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.attention_heads,
        max_position_embeddings=model.max_length,
        rope_theta=model.rope_theta,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )
    torch.manual_seed(0)
    lm = transformers.LlamaForCausalLM(config).to(on, getattr(torch, dtype)).eval()

    def run(prompts: Prompts) -> PeerRun:
        length, limit = (int(x[0]) for x in (prompts.length_B, prompts.limit_B))
        if (np.asarray(prompts.limit_B) != limit).any() or (np.asarray(prompts.length_B) != length).any():
            raise ValueError("the peer decodes rows of one length and one limit only")
        tokens_BP = torch.as_tensor(np.asarray(prompts.tokens_BP)[:, :length] % model.output_vocab, device=on)
        began = time.perf_counter()
        with torch.inference_mode():
            said = lm.generate(
                input_ids=tokens_BP.long(),
                attention_mask=torch.ones_like(tokens_BP),
                do_sample=True,
                temperature=decode.temperature,
                top_k=decode.top_k,
                top_p=decode.top_p,
                min_new_tokens=None,
                max_new_tokens=limit,
            ).cpu()  # waits for the device
        wall_s = time.perf_counter() - began
        return PeerRun(said[:, length:].numel(), wall_s)

    return run
