"""How each model family of mlx-lm spells in its config what its layers keep.

`FAMILIES` has a reader for every ``model_type``. A reader follows the model's ``make_cache`` and ``ModelArgs`` in
mlx-lm 0.32.2: which fields count, which defaults stand for a missing one, which are ignored. It returns one tuple of
`Kept` per layer, or the number of the layer whose keys and values a layer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.spec import checked_int

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS_OF_ATTENTION = (FULL, SLIDING)


class Kept(NamedTuple):
    """What one cache of a layer keeps; an array whose dtype is None has the model's."""

    kind: str
    size: int | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    arrays: tuple[tuple[tuple[int, ...], str | None], ...] = ()
    latent: bool = False


Layers = Sequence["tuple[Kept, ...] | int"]


class Fields:
    """Fields of a config above the defaults of mlx-lm's class; what is missing or wrong is refused by its name."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
        self._values = {**defaults, **given}
        self._spelled = spelled

    def value(self, name: str) -> Any:
        """The field, None if there is none."""
        return self._values.get(self._spelled.get(name, name))

    def size(self, name: str, least: int = 1) -> int:
        """The field, an int that is at least `least`."""
        value, name = self.value(name), self._spelled.get(name, name)
        if value is None:
            shown = ", ".join(sorted(map(str, self._values))) or "(none)"
            raise ValueError(f"[config] {name} is missing; the fields are {shown}")
        return checked_int("config", name, value, least)

    def size_or(self, name: str, other: str) -> int:
        """The field, that of the other name where it is missing."""
        return self.size(name if self.value(name) is not None else other)

    def items(self, name: str, kind: type, known: Sequence[Any] = (), count: int | None = None) -> list[Any]:
        """The field, a list of so many of a kind, each of them known."""
        value = self.value(name)
        if value is None:
            self.size(name)
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            what = {str: "strings", int: "integers", dict: "objects"}[kind]
            raise ValueError(f"[config] {name} must be a list of {what}, got {shortened(value)}")
        others = sorted(set(value) - set(known)) if known else []
        if others:
            raise ValueError(f"[config] {name} names {shortened(others)}, known are {', '.join(map(str, known))}")
        if count is not None and len(value) < count:
            raise ValueError(f"[config] {name} has {len(value)} items, the model {count} layers")
        return list(value)[:count]  # the rest belongs to layers that predict further tokens

    def inner(self, name: str) -> Fields:
        """The fields of an object in a field."""
        value = self.value(name)
        if not isinstance(value, Mapping):
            raise ValueError(f"[config] {name} must be an object, got {shortened(value)}")
        return Fields(value, {}, {})

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.size("num_hidden_layers")


def shortened(value: Any) -> str:
    """`value` as in Python, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class Family:
    """How configs of one ``model_type`` are read."""

    read: Callable[[Fields], Layers]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of mlx-lm's class
    spelled: Mapping[str, str] = field(default_factory=dict)  # common name of a field: its own
    text: str = ""  # "inner": the fields stand in text_config; "either": there, or beside the model_type


# ---------------------------------------------------------------------- what a layer keeps


def full(heads: int, head_dim: int, v_head_dim: int | None = None) -> tuple[Kept, ...]:
    """Keys and values of every token."""
    return (Kept("full", None, heads, head_dim, head_dim if v_head_dim is None else v_head_dim),)


def window(size: int, heads: int, head_dim: int, v_head_dim: int | None = None) -> tuple[Kept, ...]:
    """Those of the last `size` tokens."""
    return (full(heads, head_dim, v_head_dim)[0]._replace(kind="window", size=size),)


def state(*arrays: tuple[tuple[int, ...], str | None]) -> tuple[Kept, ...]:
    """Arrays whose size does not depend on the number of tokens."""
    return (Kept("state", arrays=arrays),)


def latent(f: Fields) -> tuple[Kept, ...]:
    """One latent and one rotary part per token."""
    return (full(1, f.size("kv_lora_rank"), f.size("qk_rope_head_dim"))[0]._replace(latent=True),)


def expanded(f: Fields) -> tuple[Kept, ...]:
    """Latent attention that keeps the keys and values of every head."""
    heads, rotary = f.size("num_attention_heads"), f.size("qk_rope_head_dim")
    return full(heads, f.size("qk_nope_head_dim") + rotary, f.size("v_head_dim"))


# ---------------------------------------------------------------------- heads of attention


Number = Callable[[Fields], int]


def quotient(f: Fields, name: str, parts: str) -> int:
    """One field divided by another."""
    whole, count = f.size(name), f.size(parts)
    if whole % count:
        raise ValueError(f"[config] {name} {whole} is no multiple of {parts} {count}")
    return whole // count


def kv(f: Fields) -> int:
    """KV heads, given."""
    return f.size("num_key_value_heads")


def kv_or_query(f: Fields) -> int:
    """KV heads, as many as query heads where they are left out."""
    return f.size_or("num_key_value_heads", "num_attention_heads")


def query(f: Fields) -> int:
    """As many KV heads as query heads."""
    return f.size("num_attention_heads")


def derived(f: Fields) -> int:
    """The head_dim that follows from hidden_size; mlx-lm ignores a head_dim in the config."""
    return quotient(f, "hidden_size", "num_attention_heads")


def given(f: Fields) -> int:
    """The head_dim in the config."""
    return f.size("head_dim")


def either(f: Fields) -> int:
    """The head_dim in the config, else the one that follows from hidden_size."""
    return given(f) if f.value("head_dim") is not None else derived(f)


# ---------------------------------------------------------------------- attention in every layer


def every(heads: Number, dim: Number) -> Callable[[Fields], Layers]:
    """The same in every layer, of every token."""

    return of_every_layer(lambda f: full(heads(f), dim(f)))


def of_every_layer(kept: Callable[[Fields], tuple[Kept, ...]]) -> Callable[[Fields], Layers]:
    """A reader for models whose layers all keep the same of every token: `kept(fields)`."""

    def read(f: Fields) -> Layers:
        if f.value("layer_types"):
            f.items("layer_types", str, ("attention", "chunked_attention", *KINDS_OF_ATTENTION))
        if f.value("attn_type_list"):
            f.items("attn_type_list", int, (1,))
        return [kept(f)] * f.num_layers

    return read


def windowed(f: Fields, is_sliding: Sequence[bool], heads: int, head_dim: int) -> Layers:
    """Layers with a window and layers without."""
    plain = full(heads, head_dim)
    if not any(is_sliding):
        return [plain] * len(is_sliding)
    narrow = window(f.size("sliding_window"), heads, head_dim)
    return [narrow if sliding else plain for sliding in is_sliding]


def sliding_by_type(f: Fields, period: int | None = 1) -> list[bool]:
    """By layer_types. Without them every `period`-th layer sees everything; None: the field is needed."""
    if period is not None and not f.value("layer_types"):
        return sliding_by_period(f.num_layers, period)
    return [name == SLIDING for name in f.items("layer_types", str, KINDS_OF_ATTENTION, f.num_layers)]


def sliding_by_period(num_layers: int, period: int) -> list[bool]:
    """Every `period`-th layer sees everything."""
    return [bool((layer + 1) % period) for layer in range(num_layers)]


def by_type(heads: Number, dim: Number, period: int | None = 1) -> Callable[[Fields], Layers]:
    """Windows by layer_types, see `sliding_by_type`."""

    def read(f: Fields) -> Layers:
        return windowed(f, sliding_by_type(f, period), heads(f), dim(f))

    return read


def by_pattern(f: Fields) -> Layers:
    """Windows in all layers but every ``sliding_window_pattern``-th; mlx-lm ignores layer_types here."""
    return windowed(f, sliding_by_period(f.num_layers, f.size("sliding_window_pattern")), kv(f), given(f))


def plamo3(f: Fields) -> Layers:
    """As `by_pattern`; the window has two names."""
    size = f.size_or("sliding_window", "window_size")
    narrow, plain = window(size, kv(f), given(f)), full(kv(f), given(f))
    sliding = sliding_by_period(f.num_layers, f.size("sliding_window_pattern"))
    return [narrow if is_sliding else plain for is_sliding in sliding]


def exaone4(f: Fields) -> Layers:
    """Windows where a letter of the repeated pattern is L."""
    pattern = f.value("sliding_window_pattern")
    if pattern and (not isinstance(pattern, str) or set(pattern) != set("LG")):
        raise ValueError(f"[config] sliding_window_pattern must be letters L and G, got {shortened(pattern)}")
    letters = [(pattern or "G")[layer % len(pattern or "G")] for layer in range(f.num_layers)]
    return windowed(f, [letter == "L" for letter in letters], kv(f), given(f))


def gemma3n(f: Fields) -> Layers:
    """The last layers read keys and values of the last layer of their kind that has any."""
    sliding, shared = sliding_by_type(f, None), f.size("num_kv_shared_layers", least=0)
    own = windowed(f, sliding, kv(f), given(f))[: f.num_layers - shared]
    return sharing(own, sliding)


def gemma4(f: Fields) -> Layers:
    """As `gemma3n`; layers without a window may have other heads."""
    has_types = bool(f.value("layer_types"))
    sliding = sliding_by_type(f, None if has_types else f.size("sliding_window_pattern"))
    own = f.num_layers - f.size("num_kv_shared_layers", least=0)
    is_single = f.value("attention_k_eq_v") and f.value("num_global_key_value_heads") is not None
    heads = f.size("num_global_key_value_heads") if is_single else kv(f)
    plain = full(heads, f.size("global_head_dim") if f.value("global_head_dim") else given(f))
    narrow = window(f.size("sliding_window"), kv(f), given(f))
    return sharing([narrow if is_sliding else plain for is_sliding in sliding[:own]], sliding)


def sharing(own: Layers, kinds: Sequence[bool]) -> Layers:
    """The layers behind `own` read the last one of their kind in it."""
    last = {kind: layer for layer, kind in enumerate(kinds[: len(own)])}
    missing = [layer for layer in range(len(own), len(kinds)) if kinds[layer] not in last]
    if missing:
        raise ValueError(f"[config] num_kv_shared_layers: layer {missing[0]} has no layer of its kind before to share")
    return [*own, *(last[kind] for kind in kinds[len(own) :])]


def afm7(f: Fields) -> Layers:
    """The last layers read keys and values of the last layer that has any."""
    shared = f.size("num_kv_reuse_layers", least=0)
    own = f.num_layers - shared
    if own < 1:
        raise ValueError(f"[config] num_kv_reuse_layers is {shared}, the model has {f.num_layers} layers")
    return [full(kv(f), derived(f))] * own + [own - 1] * shared


def mimo_v2_flash(f: Fields) -> Layers:
    """Windows where the pattern has 1, with heads of their own."""
    names = ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
    narrow = window(f.size("sliding_window_size"), *map(f.size, names))
    plain = full(kv(f), given(f), f.size("v_head_dim"))
    pattern = f.items("hybrid_layer_pattern", int, (0, 1), f.num_layers)
    return [narrow if is_sliding else plain for is_sliding in pattern]


def step3p5(f: Fields) -> Layers:
    """Windows by layer_types, with heads of their own."""
    heads, other = f.size("num_attention_groups"), f.value("attention_other_setting")
    if other:
        heads = f.inner("attention_other_setting").size("num_attention_groups")
    narrow = window(f.size("sliding_window"), heads, given(f))
    plain = full(f.size("num_attention_groups"), given(f))
    return [narrow if is_sliding else plain for is_sliding in sliding_by_type(f, 2)]


def llama4(f: Fields) -> Layers:
    """Chunks in all layers but every fourth."""
    plain = full(kv(f), either(f))
    chunked = (plain[0]._replace(kind="chunk", size=f.size("attention_chunk_size")),)
    return [chunked if (layer + 1) % 4 else plain for layer in range(f.num_layers)]


def iquestloopcoder(f: Fields) -> Layers:
    """Every layer runs twice and counts twice: the second time it sees a window of keys and values of its own."""
    heads, dim = kv(f), given(f)
    return [full(heads, dim)] * f.num_layers + [window(f.size("loop_window_size"), heads, dim)] * f.num_layers


def nanbeige(f: Fields) -> Layers:
    """Every layer runs several times, with keys and values of its own, and counts as often."""
    return [full(kv(f), either(f))] * (f.num_layers * f.size("num_loops"))


def gpt_bigcode(f: Fields) -> Layers:
    """One KV head, or as many as query heads."""
    return [full(1 if f.value("multi_query") else query(f), derived(f))] * f.num_layers


def plamo(f: Fields) -> Layers:
    """A KV head is shared by so many query heads."""
    return [full(-(-query(f) // f.size("n_shared_head")), derived(f))] * f.num_layers


def dbrx(f: Fields) -> Layers:
    """KV heads stand in attn_config."""
    return [full(f.inner("attn_config").size("kv_n_heads"), derived(f))] * f.num_layers


def openelm(f: Fields) -> Layers:
    """Every layer has KV heads of its own."""
    counts, dim = f.items("num_kv_heads", int, count=f.num_layers), given(f)
    return [full(checked_int("config", "num_kv_heads", heads), dim) for heads in counts]


def nemotron_nas(f: Fields) -> Layers:
    """Every layer has KV heads of its own, or no attention."""
    layers: list[tuple[Kept, ...]] = []
    for block in f.items("block_configs", dict, count=f.num_layers):
        attention = Fields(block, {}, {}).inner("attention")
        if attention.value("no_op") or attention.value("replace_with_linear"):
            layers.append(())
            continue
        heads, group = query(f), attention.size("n_heads_in_group")
        if heads % group:
            raise ValueError(f"[config] n_heads_in_group {group} does not divide num_attention_heads {heads}")
        layers.append(full(heads // group, derived(f)))
    return layers


# ---------------------------------------------------------------------- latent attention, and what stands beside


def minicpm3(f: Fields) -> Layers:
    """Keys and values of every head; the values are as wide as hidden_size."""
    heads = query(f)
    return [full(heads, f.size("qk_nope_head_dim") + f.size("qk_rope_head_dim"), derived(f))] * f.num_layers


def indexed(f: Fields) -> Layers:
    """Keys of an indexer beside the latent; mlx-lm keeps values of zeros with them."""
    return [latent(f) + full(1, f.size("index_head_dim"))] * f.num_layers


def longcat_flash(f: Fields) -> Layers:
    """Two attentions in every layer."""
    return [latent(f) * 2] * f.num_layers


def longcat_flash_ngram(f: Fields) -> Layers:
    """As `longcat_flash`; the embedding, which counts to layer 0 here, keeps the last token ids."""
    layers = longcat_flash(f)
    return [state(((f.size("emb_neighbor_num", least=2) - 1,), "int64")) + latent(f) * 2, *layers[1:]]


def minimax_m3(f: Fields) -> Layers:
    """Keys of an indexer, without values, beside the others in layers with sparse attention."""
    sparse, plain = f.value("sparse_attention_config") or {}, full(kv(f), given(f))
    settings = Fields(sparse, {}, {}) if isinstance(sparse, Mapping) else f.inner("sparse_attention_config")
    if settings.value("sparse_block_size") is None and f.value("index_block_size") is None:
        return [plain] * f.num_layers
    in_settings = settings.value("sparse_index_dim") is not None
    width = settings.size("sparse_index_dim") if in_settings else f.size("index_head_dim")
    is_sparse = [True] * f.num_layers
    if f.value("layer_types") is not None:
        is_sparse = [name != FULL for name in f.items("layer_types", str, count=f.num_layers)]
    else:
        source = settings if settings.value("sparse_attention_freq") is not None else f
        if source.value("sparse_attention_freq") is not None:
            is_sparse = [bool(n) for n in source.items("sparse_attention_freq", int, count=f.num_layers)]
    return [plain + full(1, width, 0) if sparse else plain for sparse in is_sparse]


# ---------------------------------------------------------------------- recurrent layers and convolutions


def short_conv(kernel: int, *widths: int) -> list[tuple[tuple[int, ...], str | None]]:
    """The last inputs of convolutions over the sequence, in the model's dtype."""
    return [((kernel - 1, width), None) for width in widths]


def mixed(is_state: Sequence[bool], recurrent: tuple[Kept, ...], attention: tuple[Kept, ...]) -> Layers:
    """Recurrent layers and layers of attention."""
    return [recurrent if own else attention for own in is_state]


def delta_sizes(f: Fields) -> tuple[int, int, tuple[tuple[int, ...], str]]:
    """Widths of keys and values of a gated delta net, and its state."""
    keys, values = f.size("linear_num_key_heads"), f.size("linear_num_value_heads")
    key_dim, value_dim = f.size("linear_key_head_dim"), f.size("linear_value_head_dim")
    return keys * key_dim, values * value_dim, ((values, value_dim, key_dim), "float32")


def qwen3_next(f: Fields) -> Layers:
    """A gated delta net in all layers but every ``full_attention_interval``-th."""
    keys, values, memory = delta_sizes(f)
    recurrent = state(*short_conv(f.size("linear_conv_kernel_dim"), 2 * keys + values), memory)
    is_state = sliding_by_period(f.num_layers, f.size("full_attention_interval"))
    if f.value("layer_types") and is_linear(f) != is_state:
        raise ValueError("[config] layer_types and full_attention_interval disagree; mlx-lm reads the interval")
    return mixed(is_state, recurrent, full(kv(f), either(f)))


def is_linear(f: Fields) -> list[bool]:
    """Layers of linear attention, by layer_types."""
    return [name != FULL for name in f.items("layer_types", str, ("linear_attention", FULL), f.num_layers)]


def olmo_hybrid(f: Fields) -> Layers:
    """As `qwen3_next`, with three convolutions, by layer_types."""
    keys, values, memory = delta_sizes(f)
    recurrent = state(*short_conv(f.size("linear_conv_kernel_dim"), keys, keys, values), memory)
    is_state = sliding_by_period(f.num_layers, 4)
    if f.value("layer_types") is not None:
        is_state = is_linear(f)
    return mixed(is_state, recurrent, full(kv_or_query(f), either(f)))


def kimi(num_convs: int) -> Callable[[Fields], Layers]:
    """Kimi delta attention in the layers that linear_attn_config lists, latent attention in the others."""

    def read(f: Fields) -> Layers:
        linear = f.inner("linear_attn_config")
        heads, dim = linear.size("num_heads"), linear.size("head_dim")
        convs = short_conv(linear.size("short_conv_kernel_size"), *[3 // num_convs * heads * dim] * num_convs)
        listed = set(linear.items("kda_layers", int))
        recurrent = state(*convs, ((heads, dim, dim), "float32"))
        rotary = f.size("qk_rope_head_dim") if f.value("qk_rope_head_dim") else 0
        attention = full(1, f.size("kv_lora_rank"), rotary)
        return mixed([layer + 1 in listed for layer in range(f.num_layers)], recurrent, attention)

    return read


def in_groups(f: Fields) -> list[bool]:
    """Layers that are not the last of a group of ``layer_group_size``; what fills no group has attention."""
    group, layers = f.size("layer_group_size"), f.num_layers
    return [(layer + 1) % group != 0 and layer < layers // group * group for layer in range(layers)]


def bailing_v3(f: Fields) -> Layers:
    """Kimi delta attention in groups, beside latent attention."""
    heads, dim = query(f), given(f)
    convs = short_conv(f.size("short_conv_kernel_size"), *[heads * dim] * 3)
    return mixed(in_groups(f), state(*convs, ((heads, dim, dim), "float32")), latent(f))


def bailing_hybrid(f: Fields) -> Layers:
    """Lightning attention in groups, beside latent attention."""
    heads, dim = query(f), either(f)
    return mixed(in_groups(f), state(((heads, dim, dim), "float32")), latent(f))


def bailing_linear(f: Fields) -> Layers:
    """Lightning attention in groups, with a state in the model's dtype."""
    heads, dim = query(f), derived(f)
    return mixed(in_groups(f), state(((heads, dim, dim), None)), full(kv(f), either(f)))


def short_convs(f: Fields) -> Layers:
    """Short convolutions beside attention."""
    listed = f.value("full_attn_idxs")
    if listed is None:
        names = f.items("layer_types", str, ("conv", FULL), f.num_layers)
        is_state = [name == "conv" for name in names]
    else:
        attends = set(f.items("full_attn_idxs", int))
        is_state = [layer not in attends for layer in range(f.num_layers)]
    recurrent = state(*short_conv(f.size("conv_L_cache"), f.size("hidden_size")))
    return mixed(is_state, recurrent, full(kv_or_query(f), derived(f)))


def gear(f: Fields) -> Layers:
    """Convolutions over keys and values beside attention with and without a window."""
    heads, dim = kv_or_query(f), given(f)
    narrow = window(f.size("sliding_window"), heads, dim)
    kinds = {FULL: full(heads, dim), SLIDING: narrow}
    kinds["conv_mixer"] = state(*short_conv(f.size("conv_L_cache"), *[heads * dim] * 2))
    if f.value("layer_types") is None:
        return [kinds[FULL]] * f.num_layers
    return [kinds[name] for name in f.items("layer_types", str, tuple(kinds), f.num_layers)]


def baichuan_m1(f: Fields) -> Layers:
    """Attention whose keys and values pass a convolution over two tokens."""
    sliding = set(f.items("sliding_window_layers", int))

    def layer(heads: int, kv_heads: int, size: int | None) -> tuple[Kept, ...]:
        hidden = f.size("hidden_size")
        if hidden % heads:
            raise ValueError(f"[config] hidden_size {hidden} is no multiple of {heads} heads")
        dim = hidden // heads
        last = ((kv_heads, 1, dim), None)
        return state(last, last) + (full(kv_heads, dim) if size is None else window(size, kv_heads, dim))

    plain = layer(query(f), kv(f), None)
    heads = f.size("num_swa_attention_heads") if f.value("num_swa_attention_heads") else query(f)
    kv_heads = f.size("num_swa_key_value_heads") if f.value("num_swa_key_value_heads") else kv(f)
    narrow = layer(heads, kv_heads, f.size("sliding_window"))
    return [narrow if number in sliding else plain for number in range(f.num_layers)]


def mamba2_state(
    f: Fields, heads: str, dim: str, width: str, kernel: str, groups: str, inner: int | None = None
) -> tuple[Kept, ...]:
    """A convolution over inputs, B and C, and a state in float32; the arguments are names of fields."""
    channels = f.size(heads) * f.size(dim) if inner is None else inner
    conv = short_conv(f.size(kernel), channels + 2 * f.size(groups) * f.size(width))
    return state(*conv, ((f.size(heads), f.size(dim), f.size(width)), "float32"))


MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_n_groups")


def mamba2(f: Fields) -> Layers:
    """Mamba-2 in every layer."""
    width = "ssm_state_size" if f.value("ssm_state_size") is not None else "state_size"
    return [mamba2_state(f, "num_heads", "head_dim", width, "conv_kernel", "n_groups")] * f.num_layers


def falcon_h1(f: Fields) -> Layers:
    """Mamba-2 and attention side by side in every layer."""
    return [mamba2_state(f, *MAMBA2, inner=f.size("mamba_d_ssm")) + full(kv(f), given(f))] * f.num_layers


def granite_hybrid(f: Fields) -> Layers:
    """Mamba-2 or attention, by layer_types."""
    names = f.items("layer_types", str, ("mamba", "attention"), f.num_layers)
    is_state = [name == "mamba" for name in names]
    recurrent = mamba2_state(f, *MAMBA2) if any(is_state) else ()
    return mixed(is_state, recurrent, full(kv(f), derived(f)))


NEMOTRON_LETTERS = {
    **{FULL: "*", "attention": "*", "linear_attention": "M", "mamba": "M", "conv": "M", "moe": "E", "mlp": "-"},
}


def nemotron_h(f: Fields) -> Layers:
    """A letter for each layer: M is Mamba-2, * attention; the others keep nothing."""
    pattern = f.value("hybrid_override_pattern")
    if pattern is None:
        name = "layers_block_type" if f.value("layers_block_type") else "layer_types"
        if f.value(name) is None:
            f.size("hybrid_override_pattern")
        pattern = [NEMOTRON_LETTERS[word] for word in f.items(name, str, tuple(NEMOTRON_LETTERS))]
    is_known = isinstance(pattern, str | list | tuple) and all(letter in tuple("M*-E") for letter in pattern)
    if not is_known or not pattern:
        raise ValueError(f"[config] hybrid_override_pattern must be letters of M*-E, got {shortened(pattern)}")
    recurrent = mamba2_state(f, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel", "n_groups")
    kept = {"M": recurrent, "*": full(kv(f), either(f))}
    return [kept.get(letter, ()) for letter in pattern]


def mamba_state(kernel: int, channels: int, width: int) -> tuple[Kept, ...]:
    """Mamba: a convolution and a state per channel."""
    return state(*short_conv(kernel, channels), ((channels, width), None))


def mamba(f: Fields) -> Layers:
    """Mamba in every layer."""
    return [mamba_state(f.size("conv_kernel"), f.size("intermediate_size"), f.size("state_size"))] * f.num_layers


def jamba(f: Fields) -> Layers:
    """Mamba, and attention in one layer of a period."""
    if f.value("layers_block_type") is None:
        period, offset = f.size("attn_layer_period"), f.size("attn_layer_offset", least=0)
        is_state = [layer % period != offset for layer in range(f.num_layers)]
    else:
        names = f.items("layers_block_type", str, ("mamba", "attention"), f.num_layers)
        is_state = [name == "mamba" for name in names]
    channels = f.size("mamba_expand") * f.size("hidden_size")
    recurrent = mamba_state(f.size("mamba_d_conv"), channels, f.size("mamba_d_state"))
    return mixed(is_state, recurrent, full(kv(f), derived(f)))


def plamo2(f: Fields) -> Layers:
    """Mamba with heads, and attention in one layer of a step; mlx-lm ignores the window of attention."""
    dim, heads, layers = f.size("hidden_size_per_head"), f.size("mamba_num_heads"), f.num_layers
    step = f.size("mamba_step")
    is_state = [layer % step != step // 2 for layer in range(layers)]
    if not f.value("mamba_enabled"):
        is_state = [False] * layers
    memory = ((heads, dim, f.size("mamba_d_state")), "float32")
    return mixed(is_state, state(*short_conv(f.size("mamba_d_conv"), heads * dim), memory), full(kv(f), dim))


def recurrent_gemma(f: Fields) -> Layers:
    """Gated linear recurrences, and a window with one KV head; mlx-lm's convolution is always 4 wide."""
    width = f.size("hidden_size")
    names = f.items("block_types" if f.value("block_types") is not None else "_block_types", str)
    if not names or set(names) - {"recurrent", "attention"}:
        raise ValueError(f"[config] block_types names {shortened(names)}, known are recurrent, attention")
    kinds = {
        "recurrent": state(*short_conv(4, width), ((width,), None)),
        "attention": window(f.size("attention_window_size"), 1, derived(f)),
    }
    return [kinds[names[layer % len(names)]] for layer in range(f.num_layers)]


def rwkv7(f: Fields) -> Layers:
    """The last inputs of both halves of a layer, and a state per head."""
    width, dim = f.size("hidden_size"), given(f)
    last = ((1, width), None)
    return [state(last, ((quotient(f, "hidden_size", "head_dim"), dim, dim), None), last)] * f.num_layers


def mistral3(f: Fields) -> Layers:
    """A wrapper without a cache of its own: every token in every layer, whatever the windows."""
    is_latent = f.value("model_type") == "mistral4"
    return [latent(f) if is_latent else full(kv_or_query(f), either(f))] * f.num_layers


def refused(why: str) -> Callable[[Fields], Layers]:
    """A family that keeps what no group here is."""

    def read(f: Fields) -> Layers:
        raise ValueError(f"[config] model_type {shortened(f.value('model_type'))}: {why}")

    return read


# ---------------------------------------------------------------------- the table


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def sizes(*values: int, **others: Any) -> dict[str, Any]:
    """Defaults of a class: hidden size, layers, heads, KV heads, and others by name."""
    return dict(zip(_SIZES, values, strict=False)) | others


_GPT = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
_NUM_LAYERS = {"num_hidden_layers": "num_layers"}
_RANKS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK = sizes(4096, 30, 32, 32, **_RANKS)
_QWEN3_5 = sizes(
    *(4096, 32, 32, 8),
    **{"linear_num_value_heads": 64, "linear_num_key_heads": 16, "linear_key_head_dim": 192},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
)
_GEMMA3 = sizes(1152, 26, 4, 1, head_dim=256, sliding_window=512, sliding_window_pattern=6)
_GEMMA4 = sizes(
    *(1536, 35, 8, 1),
    **{"head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 20, "sliding_window": 512},
    **{"sliding_window_pattern": 5, "attention_k_eq_v": False},
)
_GLIMMER = sizes(6656, 52, 32, 2, head_dim=128, sliding_window=2048)
_BAILING_V3 = sizes(1536, 24, 16, head_dim=128, layer_group_size=4, short_conv_kernel_size=4, **_RANKS)

LLAMA = Family(by_type(kv_or_query, either))
DEEPSEEK_V3 = Family(of_every_layer(latent), _DEEPSEEK)
QWEN3_5 = Family(qwen3_next, _QWEN3_5, text="either")

FAMILIES: dict[str, Family] = {
    # the same keys and values of every token in every layer
    **dict.fromkeys(
        (
            *("apertus", "bailing_moe", "granite", "granitemoe", "helium", "hunyuan", "klear", "mimo", "minicpm"),
            *("phi3small", "qwen2", "stablelm", "starcoder2"),
        ),
        Family(every(kv, derived)),
    ),
    **dict.fromkeys(("internlm2", "internlm3", "phi3", "qwen2_moe"), Family(every(kv_or_query, derived))),
    **dict.fromkeys(
        (
            *("bitnet", "dots1", "ernie4_5", "ernie4_5_moe", "glm", "hunyuan_v1_dense", "minimax", "minimax_m2"),
            *("nemotron", "telechat3"),
        ),
        Family(every(kv, either)),
    ),
    **dict.fromkeys(("olmo2", "olmoe", "smollm3"), Family(every(kv_or_query, either))),
    **dict.fromkeys(
        ("gemma", "gemma2", "glm4", "glm4_moe", "llama4_text", "qwen3", "qwen3_moe", "seed_oss", "solar_open"),
        Family(every(kv, given)),
    ),
    "cohere": Family(every(kv, derived), sizes(8192, 40, 64, 64)),
    "deepseek": Family(every(kv, derived), sizes(4096, 30, 32, 32)),
    "exaone": Family(every(kv, either), spelled=_NUM_LAYERS),
    "gpt2": Family(every(query, derived), spelled=_GPT),
    "gpt_bigcode": Family(gpt_bigcode, {"multi_query": True}, _GPT),
    "gpt_neox": Family(every(query, derived)),
    "gptj": Family(every(query, derived), {"n_embd": 4096, "n_head": 16, "n_layer": 28}, _GPT),
    "lille-130m": Family(every(kv, derived), spelled=_GPT | {"num_key_value_heads": "n_kv_heads"}),
    "mixtral": Family(every(kv_or_query, derived), sizes(4096, 32, 32, 8)),
    "nanochat": Family(every(kv, derived), sizes(1280, 20, 10, 10)),
    "olmo": Family(
        every(query, derived),
        spelled={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ),
    "phi": Family(every(kv_or_query, derived), sizes(2560, 32, 32, 32)),
    "phimoe": Family(every(kv, derived), sizes(4096, 32, 32, 8)),
    **dict.fromkeys(
        ("phi-msft", "phixtral"),
        Family(
            every(query, derived),
            {"model_dim": 2560, "num_heads": 32, "num_layers": 32},
            {"hidden_size": "model_dim", "num_attention_heads": "num_heads", **_NUM_LAYERS},
        ),
    ),
    "qwen": Family(every(query, given), sizes(2048, 24, 16, kv_channels=128), {"head_dim": "kv_channels"}),
    "talkie": Family(every(query, given), sizes(5120, 40, 40, head_dim=128)),
    # heads that are spelled or shared out in a way of their own
    "afm7": Family(
        afm7,
        spelled={
            **{"hidden_size": "hidden_dim", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"},
            **_NUM_LAYERS,
        },
    ),
    "dbrx": Family(
        dbrx,
        spelled={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ),
    "nanbeige": Family(nanbeige, {"num_loops": 1}),
    "nemotron-nas": Family(nemotron_nas, sizes(8192, 80, 64)),
    "openelm": Family(openelm, spelled={"num_hidden_layers": "num_transformer_layers"}),
    "plamo": Family(plamo, {"n_shared_head": 8}),
    # windows and chunks
    "afmoe": Family(by_type(kv, given, None), sizes(2048, 32, 32, 4, head_dim=64, sliding_window=2048)),
    "cohere2": Family(by_pattern, sizes(4096, 32, 32, 8, head_dim=128, sliding_window=4096, sliding_window_pattern=4)),
    "exaone4": Family(exaone4),
    "exaone_moe": Family(by_type(kv, given, None)),
    "gemma3_text": Family(by_pattern, _GEMMA3),
    "gemma3": Family(
        by_pattern,
        _GEMMA3 | {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
        text="inner",
    ),
    "gemma3n": Family(gemma3n, text="inner"),
    "gemma4_text": Family(gemma4, _GEMMA4),
    **dict.fromkeys(("gemma4", "gemma4_unified"), Family(gemma4, _GEMMA4, text="inner")),
    "gpt_oss": Family(by_type(kv, given, 2), sizes(2880, 36, 64, 8, head_dim=64, sliding_window=128)),
    "iquestloopcoder": Family(iquestloopcoder, {"loop_window_size": 64}),
    "laguna": Family(by_type(kv, given), sizes(2048, 40, 48, 8, head_dim=128, sliding_window=512)),
    **dict.fromkeys(("iquestcoder", "llama", "ministral3", "mistral", "xverse"), LLAMA),
    "llama4": Family(llama4, text="inner"),
    "mellum": Family(by_type(kv, given, None)),
    "mimo_v2_flash": Family(mimo_v2_flash),
    "muse_glimmer": Family(by_type(kv, given, 4), _GLIMMER, text="either"),
    "muse_spark": Family(by_type(kv, given, None), text="inner"),
    "olmo3": Family(by_type(kv_or_query, either, 4)),
    "plamo3": Family(plamo3, sizes(4096, 32, 32, 4, head_dim=128, window_size=2048, sliding_window_pattern=8)),
    "spark2_5": Family(by_type(kv, given, 4)),
    "step3p5": Family(step3p5, {"sliding_window": 512}),
    # latents
    "deepseek_v2": Family(of_every_layer(expanded), _DEEPSEEK),
    **dict.fromkeys(("deepseek_v3", "joyai_llm_flash", "kimi_k2"), DEEPSEEK_V3),
    **dict.fromkeys(("kimi_k25", "kimi_vl"), Family(of_every_layer(latent), _DEEPSEEK, text="inner")),
    "deepseek_v32": Family(indexed, _DEEPSEEK | {"index_head_dim": 128}),
    "deepseek_v41": Family(refused("it keeps one latent for several tokens (compress_ratios), which is no group here")),
    "glm4_moe_lite": Family(of_every_layer(latent), sizes(2048, 47, 20, 20, kv_lora_rank=512, qk_rope_head_dim=64)),
    "glm_moe_dsa": Family(indexed),
    "longcat_flash": Family(longcat_flash, spelled=_NUM_LAYERS),
    "longcat_flash_ngram": Family(longcat_flash_ngram, {"emb_neighbor_num": 4}, _NUM_LAYERS),
    "minicpm3": Family(minicpm3),
    "minimax_m3_vl": Family(minimax_m3, sizes(6144, 60, 64, 4, head_dim=128), text="inner"),
    "mistral4": Family(of_every_layer(latent)),
    "youtu_llm": Family(of_every_layer(expanded), sizes(2048, 32, 16, 16, **_RANKS)),
    # recurrent layers
    "baichuan_m1": Family(baichuan_m1),
    "bailing_hybrid": Family(bailing_hybrid),
    "bailing_moe_linear": Family(bailing_linear),
    "bailing_moe_v3": Family(bailing_v3, _BAILING_V3),
    "falcon_h1": Family(
        falcon_h1,
        sizes(
            *(1024, 36, 8, 2),
            **{"head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64},
            **{"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1},
        ),
    ),
    "gear": Family(gear, {"sliding_window": 512, "conv_L_cache": 3}),
    "granitemoehybrid": Family(granite_hybrid),
    "jamba": Family(jamba),
    "kimi_k3": Family(kimi(1), sizes(7168, 93, 96, 96), text="either"),
    "kimi_linear": Family(kimi(3)),
    "lfm2": Family(short_convs),
    "lfm2-vl": Family(short_convs, text="inner"),
    "lfm2_moe": Family(short_convs),
    **dict.fromkeys(("falcon_mamba", "mamba"), Family(mamba)),
    "mamba2": Family(mamba2),
    "nemotron_h": Family(nemotron_h),
    "olmo_hybrid": Family(olmo_hybrid),
    "plamo2": Family(
        plamo2,
        sizes(
            *(4096, 32, 32, 4),
            **{"hidden_size_per_head": 128, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_num_heads": 64},
            **{"mamba_step": 2, "mamba_enabled": True},
        ),
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"), QWEN3_5),
    "qwen3_next": Family(qwen3_next, {"full_attention_interval": 4}),
    "recurrent_gemma": Family(recurrent_gemma),
    "rwkv7": Family(rwkv7),
    # wrappers of a text model
    **dict.fromkeys(("llava", "mistral3"), Family(mistral3, text="inner")),
    "pixtral": Family(every(kv_or_query, either), {"num_attention_heads": 32}, text="inner"),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), Family(every(kv, derived), text="either")),
    "qwen3_vl": Family(every(kv, given), text="either"),
    "qwen3_vl_moe": Family(every(kv, given), text="inner"),
}
