"""What mlx-lm's own server class asks for, without a command line and without files."""

from types import SimpleNamespace

from mlx_lm import server


def provide(model, tokenizer, kv_bits=None):
    """What the server asks of its model provider."""
    cli_args = SimpleNamespace(
        decode_concurrency=4,
        prompt_concurrency=2,
        prefill_step_size=16,
        prompt_cache_bytes=2**30,
        chat_template_args={},
        kv_bits=kv_bits,
        kv_group_size=64,
        quantized_kv_start=0,
        num_draft_tokens=0,
        max_tokens=10,
        temp=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        allowed_origins=["*"],
    )
    return SimpleNamespace(
        cli_args=cli_args,
        model=model,
        tokenizer=tokenizer,
        model_key=("tiny", None, None),
        is_batchable=True,
        draft_model=None,
        processor=None,
        load=lambda *names: (model, tokenizer),
        load_default=lambda: None,
        reset=lambda: None,
    )


def arguments(seed):
    """Greedy, 10 tokens; with a seed the server does not batch."""
    return server.GenerationArguments(
        model=server.ModelDescription("tiny", None, None),
        sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
        logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=10,
        num_draft_tokens=0,
        logprobs=False,
        top_logprobs=0,
        seed=seed,
        chat_template_kwargs=None,
    )
