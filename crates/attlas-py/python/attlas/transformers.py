"""Every causal model of Hugging Face transformers: `attn_implementation="attlas"`, recipes by layer and head, streams, extraction.

>>> import attlas.transformers
>>> "attlas:hyper" in attlas.transformers.register()
True
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import warnings
from collections import Counter
from typing import Any

from . import _native
from ._arrays import TORCH, threads_for
from ._core import methods
from ._errors import ModelError, NeedsCopy, UnsupportedError, missing
from ._records import Record
from .lab import Recipe, Trace, as_recipe, token_ids

try:
    import torch
    import transformers
    from transformers.cache_utils import DynamicCache, DynamicLayer
    from transformers.masking_utils import (
        AttentionMaskInterface,
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
except ImportError as _error:
    raise missing(_error.name or "transformers", "transformers") from None

from .torch import _refuse, _wide, exact_gradient

_MASK_ROWS = 256
"""Rows of a mask that are held as a square at one time."""

_HARMLESS = frozenset(
    {
        "attention_mask", "cache_position", "output_hidden_states", "position_embeddings", "position_ids",
        "return_dict", "sliding_window", "use_cache", "logits_to_keep", "num_items_in_batch", "labels", "training",
        "past_key_values", "token_type_ids", "input_ids", "inputs_embeds", "return_loss", "is_training",
        "output_router_logits", "encoder_hidden_states", "encoder_attention_mask", "mm_token_type_ids",
    }
)  # fmt: skip
"""Keywords that do not change what attention computes: the mask holds windows, positions are in queries and keys."""

_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen"})
"""Keywords of packed sequences: the mask says the same, where there is one."""

_NAMED = {
    "softcap": "the scores are capped (softcap), which no method here computes",
    "position_bias": "a position bias is added to the scores",
    "indices": "the model chooses its own sparse keys",
    "block_indices": "the model chooses its own sparse keys",
    "cache": "a paged cache is read through a table",
    "head_mask": "heads are masked one by one",
    "output_attentions": "attention weights as output, which are never stored",
}


class _Entry:
    """One registered name."""

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name, self.recipe = name, recipe
        self.lock = threading.Lock()
        self.record: dict[int, tuple[Any, Any, Any, float]] | None = None
        self.left_out: dict[int, str] = {}
        self.sinks: set[int] = set()
        data = recipe.to_dict()
        plain = [data["default"], *data.get("rule", [])]
        self.exact = all(c["method"] == "exact" and not c.get("params") for c in plain)
        self.forget()

    def forget(self) -> None:
        self.calls = 0
        self.keys = 0
        self.counts: Counter[tuple[int, str, str, int, int]] = Counter()

    def count(self, layer: int, counts: list[tuple[str, str, int, int, int]], keys: int) -> None:
        with self.lock:
            self.calls += 1
            self.keys += keys
            for method, kind, first, end, runs in counts:
                self.counts[layer, method, kind, first, end] += runs


_ENTRIES: dict[str, _Entry] = {}
_NUMBERS = itertools.count(1)


def _interval(seen: Any) -> Any:
    """The interval of keys in each row of a boolean mask: equal ends for none, (-1, -1) if there are gaps."""
    n_k = seen.shape[-1]
    n = seen.sum(-1)
    if n_k == 0:
        return torch.stack([n, n], -1)
    whole = seen.to(torch.int32)
    first = whole.argmax(-1)
    last = n_k - whole.flip(-1).argmax(-1)
    some = n > 0
    first, last = torch.where(some, first, 0), torch.where(some, last, 0)
    gap = n != last - first
    return torch.stack([torch.where(gap, -1, first), torch.where(gap, -1, last)], -1)


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Any:
    """The mask of transformers as int32 `[B, 1, N, 2]`: the half-open interval of keys that each query sees.

    Four axes, by which `generate()` recognises a finished mask; tensor operations only, which compile.
    """
    plain = mask_function is bidirectional_mask_function
    if mask_function is causal_mask_function or plain:
        if plain:
            ends = torch.full((q_length,), kv_length, device=device)
        else:
            ends = (torch.arange(q_length, device=device) + q_offset - kv_offset + 1).clamp(0, kv_length)
        ends = ends[None].expand(batch_size, q_length)
        starts = torch.zeros_like(ends)
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            valid = _interval(padding[:, kv_offset : kv_offset + kv_length].bool())
            first, last = valid[:, :1], valid[:, 1:]
            gap = (first < 0).expand_as(starts)
            starts = torch.maximum(starts, first)
            ends = torch.maximum(torch.minimum(ends, last), starts)
            starts, ends = torch.where(gap, -1, starts), torch.where(gap, -1, ends)
        return torch.stack([starts, ends], -1)[:, None].to(torch.int32).contiguous()
    blocks = []
    for at in range(0, q_length, _MASK_ROWS):
        n = min(_MASK_ROWS, q_length - at)
        seen = sdpa_mask(
            batch_size=batch_size, q_length=n, kv_length=kv_length, q_offset=q_offset + at, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        blocks.append(_interval(seen.expand(batch_size, 1, n, kv_length)[:, 0]))
    return torch.cat(blocks, 1)[:, None].to(torch.int32).contiguous()


def _reduced(mask: Any, n_k: int) -> Any:
    """A mask that a user passed, as intervals."""
    reasons = []
    if mask.dim() != 4:
        reasons.append(f"a mask of {mask.dim()} axes, expected [batch, 1 or heads, queries, keys]")
    elif mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        low = torch.finfo(mask.dtype).min / 2
        seen = mask == 0
        if not bool((seen | (mask <= low)).all()):
            reasons.append("the mask adds to the scores: only 0 and -inf can be expressed")
    else:
        reasons.append(f"a mask of {mask.dtype}, expected bool or the floats 0 and -inf")
    if not reasons:
        seen = seen[..., :n_k]
        if seen.shape[1] > 1 and not bool((seen == seen[:, :1]).all()):
            reasons.append("the mask differs between heads")
    if reasons:
        raise UnsupportedError(f"attlas cannot do this: {'; '.join(reasons)}", "attlas", reasons)
    return _interval(seen[:, 0])[:, None].to(torch.int32).contiguous()


def _run(entry: _Entry, layer: int, q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, lse: Any, streams: Any) -> Any:
    """One layer's attention, `[B, N, H, Dv]`."""
    wide = _wide(q)
    a, b, c = (x if x.dtype is wide and type(x) is torch.Tensor else x.detach().to(wide) for x in (q, k, v))
    out = torch.empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), dtype=wide)
    threads = threads_for(None, TORCH)
    native = entry.recipe._native

    def attend(a: Any, b: Any, c: Any) -> tuple[list[Any], int]:
        if streams is not None:
            return streams.attend(a, b, c, out, scale, threads), 0
        return _native.attend_runs(a, b, c, out, lse, mask, causal, native, layer, scale, threads)

    try:
        counts, keys = attend(a, b, c)
    except NeedsCopy:
        counts, keys = attend(TORCH.copy(a), TORCH.copy(b), TORCH.copy(c))
    entry.count(layer, counts, keys)
    return out.to(q.dtype)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "attlas::hf_attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int layer, str name, bool want_lse)"
    " -> (Tensor, Tensor)",
)
def _op(
    q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, layer: int, name: str, want_lse: bool
) -> tuple[Any, Any]:
    lse = torch.empty(q.shape[:-1] if want_lse else (0,), dtype=_wide(q))
    out = _run(_ENTRIES[name], layer, q, k, v, mask, scale, causal, lse if want_lse else None, None)
    return out, lse


@_op.register_fake  # type: ignore[untyped-decorator]
def _fake(
    q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, layer: int, name: str, want_lse: bool
) -> tuple[Any, Any]:
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1] if want_lse else (0,), dtype=_wide(q))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, mask, ctx.scale, ctx.causal, _, ctx.name, _ = inputs
    ctx.has_mask = mask is not None
    ctx.save_for_backward(q, k, v, *output, *([mask] if mask is not None else []))


def _backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    if lse.numel() == 0 and q.numel():
        raise _refuse(", ".join(_ENTRIES[ctx.name].recipe.methods))
    n_q, n_k = q.shape[-2], k.shape[-2]
    if rest:
        starts, ends = rest[0][:, 0, :, 0].long(), rest[0][:, 0, :, 1].long()
    else:
        ends = torch.full((1, n_q), n_k)
        if ctx.causal and n_q > 1:
            ends = (torch.arange(n_q) + 1).clamp(max=n_k)[None]
        starts = torch.zeros_like(ends)
    grads = exact_gradient(
        q, k, v, out.transpose(1, 2), lse, d_out.transpose(1, 2), d_lse, ctx.scale, starts, ends
    )
    return (*grads, None, None, None, None, None, None)


_op.register_autograd(_backward, setup_context=_setup)


def _reasons(query: Any, dropout: float, mask: Any, kwargs: dict[str, Any]) -> list[str]:
    found = []
    for name, value in kwargs.items():
        if value is None or value is False or name in _HARMLESS or (name in _PACKED and mask is not None):
            continue
        found.append(_NAMED.get(name, f"the keyword {name} is not known, and may change what is computed"))
    if dropout > 0:
        found.append("dropout of attention weights: set attention_dropout=0 or call model.eval()")
    if query.device.type not in ("cpu", "meta"):
        found.append(f"tensors are read on the cpu, these are on {query.device}")
    return found


def _forward(
    name: str,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    entry = _ENTRIES[name]
    layer = getattr(module, "layer_idx", None)
    layer = 0 if layer is None else int(layer)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask = attention_mask
    if mask is not None and (mask.dtype != torch.int32 or mask.shape[-1] != 2):
        mask = _reduced(mask, key.shape[-2])
    reasons = _reasons(query, dropout, mask, kwargs)
    if entry.record is not None and not torch.compiler.is_compiling():
        _keep(entry, layer, query, key, value, mask, scale, causal, s_aux, reasons, kwargs)
        if reasons:
            return _by_hand(query, key, value, mask, scale, causal, s_aux, kwargs), None
    if reasons:
        raise UnsupportedError(f"attlas cannot do this: {'; '.join(reasons)}", "attlas", reasons)
    streams = None if torch.compiler.is_compiling() else _streams(entry, layer, query, key, value, mask, scale)
    if streams is not None and s_aux is None:
        return _run(entry, layer, query, key, value, None, scale, False, None, streams), None
    tracked = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    want_lse = s_aux is not None or (tracked and entry.exact)
    if tracked or torch.compiler.is_compiling():
        out, lse = _op(query, key, value, mask, scale, causal, layer, name, want_lse)
    else:
        lse = torch.empty(query.shape[:-1], dtype=_wide(query)) if want_lse else None
        out = _run(entry, layer, query, key, value, mask, scale, causal, lse, None)
    if s_aux is not None:
        share = torch.sigmoid(lse - s_aux.to(lse.dtype)[None, :, None]).transpose(1, 2)[..., None]
        out = (out * share).to(query.dtype)
    return out, None


def _keep(
    entry: _Entry, layer: int, q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, s_aux: Any,
    reasons: list[str], kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Keep the arguments of the recording function, if a trace can represent them."""
    assert entry.record is not None
    n = q.shape[-2]
    why = "; ".join(reasons)
    if not why and mask is not None:
        runs = _native.runs(mask, k.shape[-2])
        if runs != [[("causal", 0, n, 0, n, 0)]] * len(runs) and n > 1:
            kind = runs[0][0][0] if runs and runs[0] else "empty"
            why = "its window is shorter than the text" if kind == "window" else "its mask is not causal"
    elif not why and not causal:
        why = "its mask is not causal"
    if not why and k.shape[-2] != n:
        why = "it has other keys than the text's"
    if why:
        entry.left_out[layer] = why
    elif layer not in entry.record:
        a, b, c = (x[0].detach().float().contiguous() for x in (q, k, v))
        entry.record[layer] = (a, b, c, scale)
        if s_aux is not None:
            entry.sinks.add(layer)


def _by_hand(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, s_aux: Any, kwargs: dict[str, Any]) -> Any:
    """Attention of a layer that a trace leaves out; later layers then get the model's own values."""
    size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(size, 1) for x in (k, v))
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if (cap := kwargs.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    if (bias := kwargs.get("position_bias")) is not None:
        scores = scores + bias.float()
    unknown = sorted(
        n for n, x in kwargs.items()
        if x is not None and x is not False and n not in _HARMLESS and n not in _PACKED and n not in ("softcap", "position_bias")
    )  # fmt: skip
    if unknown:
        raise UnsupportedError(f"attlas cannot read this model: the keyword {unknown[0]} is not known", "attlas", unknown)
    keys = torch.arange(k.shape[-2])
    if mask is not None:
        seen = (keys >= mask[:, 0, :, :1]) & (keys < mask[:, 0, :, 1:])
        scores = scores.masked_fill(~seen[:, None], -math.inf)
    elif causal and q.shape[-2] > 1:
        scores = scores.masked_fill(keys > torch.arange(q.shape[-2])[:, None], -math.inf)
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    return (torch.nan_to_num(p) @ v.float()).transpose(1, 2).contiguous().to(q.dtype)


def _put(name: str, recipe: Recipe) -> _Entry:
    entry = _ENTRIES.get(name)
    if entry is not None and entry.recipe.to_dict() == recipe.to_dict():
        return entry
    entry = _ENTRIES[name] = _Entry(name, recipe)

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
        return _forward(name, module, query, key, value, attention_mask, **kwargs)

    attention.__name__ = f"attlas_{name}"
    # Without a mask function of the same name, transformers silently drops padding and windows.
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, interval_mask)
    return entry


def register(name: str = "attlas", method: str = "exact", *, recipe: Any = None, **params: Any) -> list[str]:
    """Register names for `attn_implementation`.

    Without arguments: `attlas` (exact attention) and `attlas:<id>` for every causal method that needs no calibration and is
    no oracle. With a name, a method or a recipe: one more.

    Returns
    -------
    The names.
    """
    if name == "attlas" and method == "exact" and recipe is None and not params:
        names = ["attlas"]
        _put("attlas", Recipe.uniform("exact"))
        for m in methods(causal=True):
            if m.claims.needs != "calibration" and not m.claims.oracle:
                _put(f"attlas:{m.id}", Recipe.uniform(m.id))
                names.append(f"attlas:{m.id}")
        return names
    if not name.startswith("attlas") or any(w in name for w in ("sdpa", "flash", "flex_attention", "paged|", "/")):
        raise ValueError(
            f"name: expected one that begins with attlas and has none of sdpa, flash, flex_attention, paged| and /, found {name!r}"
        )
    _put(name, as_recipe(recipe, params) if recipe is not None else Recipe.uniform(method, **params))
    return [name]


def stats(name: str = "attlas", *, reset: bool = False) -> Record:
    """Calls of one registered name by layer, method and heads; shows where exact attention replaced a method."""
    entry = _ENTRIES.get(name)
    if entry is None:
        raise KeyError(f"expected one of {', '.join(sorted(_ENTRIES)) or 'no name yet: call register()'}, found {name!r}")
    with entry.lock:
        rows = [
            {"layer": layer, "method": method, "kind": kind, "heads": [first, end], "runs": runs}
            for (layer, method, kind, first, end), runs in sorted(entry.counts.items())
        ]
        told = Record({"name": name, "calls": entry.calls, "keys_visited": entry.keys, "rows": rows}, rows="rows")
        if reset:
            entry.forget()
    return told


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _sizes(model: Any) -> tuple[int, int, int, int]:
    """Layers, heads, key heads, width."""
    c = _text_config(model)
    heads = int(c.num_attention_heads)
    kv = int(getattr(c, "num_key_value_heads", None) or heads)
    width = getattr(c, "head_dim", None) or getattr(c, "qk_head_dim", None) or c.hidden_size // heads
    return int(c.num_hidden_layers), heads, kv, int(width)


def shape_of(model: Any) -> str:
    """The sizes of a model in one line, as recipes carry them."""
    layers, heads, kv_heads, width = _sizes(model)
    vocab = int(getattr(_text_config(model), "vocab_size", 0))
    return f"{layers} layers, {heads} heads, {kv_heads} key heads, width {width}, {vocab} tokens known"


def _longest(model: Any) -> int:
    return int(getattr(_text_config(model), "max_position_embeddings", None) or 1 << 20)


def _check_interface(model: Any) -> None:
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    if not models:
        raise ModelError(f"expected a model of transformers, found {type(model).__name__}")
    closed = sorted({type(m).__name__ for m in models if not type(m)._can_set_attn_implementation()})
    if closed:
        raise ModelError(
            f"{', '.join(closed)} does not use the attention interface of transformers: it would go on with its own attention"
        )


class use:
    """Make a model use a method, a recipe or the recipe of a file; `with` restores the former attention.

    >>> import attlas.transformers as hf
    >>> with hf.use(model, "sink_window", window=64):  # doctest: +SKIP
    ...     model.generate(**inputs)
    """

    def __init__(self, model: Any, method: Any = "exact", *, submodels: bool = False, **params: Any) -> None:
        _check_interface(model)
        recipe = as_recipe(method, params)
        name, shape = recipe._native.made_for
        if shape and shape != shape_of(model):
            what = f"expected a recipe for a model of {shape_of(model)}, found one for {name or 'another model'} of {shape}"
            raise ModelError(what)
        causal = not getattr(model.config, "is_encoder_decoder", False) and _is_causal(model)
        recipe._native.check(*_sizes(model), causal)
        self.model, self.recipe = model, recipe
        self.name = f"attlas:#{next(_NUMBERS)}"
        self._entry = _put(self.name, recipe)
        self._former = model.config._attn_implementation
        nested = "text_config" in getattr(model.config, "sub_configs", {}) and not submodels
        self._key = "text_config" if nested else None
        if nested:
            self._former = _text_config(model)._attn_implementation
        self._set(self.name)

    def _set(self, name: str) -> None:
        self.model.set_attn_implementation({self._key: name} if self._key else name)

    def __enter__(self) -> use:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self._former)
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)
        _ENTRIES.pop(self.name, None)

    def stats(self) -> Record:
        """Calls by layer and method."""
        return stats(self.name)


def _is_causal(model: Any) -> bool:
    marks = [m.is_causal for m in model.modules() if hasattr(m, "is_causal") and not isinstance(m, PreTrainedModel)]
    return any(marks) or not marks


class _StreamLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values with the method's stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams: Any = None
        self.plain = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        # The attention function receives exactly this tensor and nothing else of the cache.
        keys._attlas = self
        return keys, values

    def _moved(self) -> None:
        self.streams = None

    def reorder_cache(self, *args: Any, **kwargs: Any) -> Any:
        self._moved()
        return super().reorder_cache(*args, **kwargs)

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> Any:
        self._moved()
        return super().batch_select_indices(*args, **kwargs)

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> Any:
        self._moved()
        return super().batch_repeat_interleave(*args, **kwargs)

    def crop(self, *args: Any, **kwargs: Any) -> Any:
        self._moved()
        return super().crop(*args, **kwargs)

    def reset(self) -> None:
        self._moved()
        super().reset()


class StreamCache(DynamicCache):  # type: ignore[misc]
    """A cache whose layers also keep the streams of their methods, which then decode.

    Without it, tokens after the prompt are decoded by exact attention over the keys. Padded batches, methods without a
    stream and compiled models decode exactly in any case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = _StreamLayer


def _streams(entry: _Entry, layer: int, query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    """The streams of a layer that decodes one token, or `None`."""
    held = getattr(key, "_attlas", None)
    if held is None:
        return None
    n_k = key.shape[-2]
    if mask is not None and not bool((mask == torch.tensor([0, n_k], dtype=torch.int32)).all()) and query.shape[-2] == 1:
        held.plain = False
    if query.shape[-2] != 1 or not held.plain or n_k < 2:
        return None
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    owner = (entry.name, id(entry))
    if held.streams is None or held.streams[0] != owner or len(held.streams[1]) > n_k:
        sizes = [query.shape[0], query.shape[1], key.shape[1], max(n_k, _CAPACITY), query.shape[-1], value.shape[-1]]
        made = _native.Streams(entry.recipe._native, layer, sizes, scale, query.dtype == torch.float64)
        held.streams = (owner, made)
    streams = held.streams[1]
    return streams if streams.any else None


_CAPACITY = 4096
"""Tokens that the plan of a stream is made for; a stream takes more."""


class record:
    """Record the queries, keys and values of every layer while a model runs: `with record(model) as r: model(...)`; `r.trace()`."""

    def __init__(self, model: Any) -> None:
        self._used = use(model, "exact")
        self._used._entry.record = {}

    def __enter__(self) -> record:
        return self

    def __exit__(self, *args: object) -> None:
        self._used.__exit__(*args)

    @property
    def layers(self) -> dict[int, tuple[Any, Any, Any, float]]:
        """`{layer: (q, k, v, scale)}`, tensors `[heads, n, d]`."""
        return dict(self._used._entry.record or {})

    @property
    def left_out(self) -> dict[int, str]:
        """Layers that a trace cannot represent, with the reason."""
        return dict(self._used._entry.left_out)

    @property
    def sinks(self) -> list[int]:
        """Recorded layers with learnt sinks. Their output is `out · sigmoid(lse - sink)`: the trace has `out`."""
        return sorted(self._used._entry.sinks & set(self.layers))

    def trace(self, source: str = "model", metadata: dict[str, str] | None = None) -> Trace:
        """The recorded trace."""
        if self.left_out:
            words = "; ".join(f"layer {n}: {why}" for n, why in sorted(self.left_out.items()))
            warnings.warn(f"layers left out of the trace: {words}", stacklevel=2)
        if self.sinks:
            numbers = ",".join(map(str, self.sinks))
            metadata = {**(metadata or {}), "sinks": numbers}
            warnings.warn(
                f"layers {numbers} have learnt sinks: the trace holds attention before they take their share of a row", stacklevel=2
            )
        if not self.layers:
            why = "; ".join(sorted(set(self.left_out.values()))) or "the model did not call the attention interface"
            raise ModelError(f"nothing was recorded: {why}")
        return Trace.from_arrays(
            {n: (q, k, v) for n, (q, k, v, _) in self.layers.items()},
            causal=True,
            scale={n: s for n, (*_, s) in self.layers.items()},
            source=source,
            metadata=metadata,
        )


def _chosen(text: str | None, n: int, what: str) -> list[int] | None:
    from .lab import _numbers

    if text is None:
        return None
    found = _numbers(text)
    if not found or max(found) >= n:
        raise ModelError(f"{what}: expected 0 to {n - 1}, found {text}")
    return found


def _extract(model: Any, text: Any, tokenizer: Any, tokens: int, layers: str | None, heads: str | None) -> Trace:
    ids, source, digest = token_ids(text, tokenizer)
    ids = ids[:tokens]
    n_layers, n_heads, n_kv, _ = _sizes(model)
    wanted, query_heads = _chosen(layers, n_layers, "layers"), _chosen(heads, n_heads, "heads")
    was_training = model.training
    model.eval()
    try:
        with record(model) as recorded, torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
            kept = recorded._used._entry.record
            assert kept is not None
            for n in list(kept):
                if wanted is not None and n not in wanted:
                    del kept[n]
            if query_heads is not None:
                size = n_heads // n_kv
                groups = sorted({h // size for h in query_heads})
                if any(sum(h // size == g for h in query_heads) * len(groups) != len(query_heads) for g in groups):
                    raise ModelError("heads: expected as many of every key head that keeps any")
                for n, (q, k, v, s) in kept.items():
                    kept[n] = (q[query_heads], k[groups], v[groups], s)
            # A llama GGUF file interleaves the coordinates of a head; transformers keeps halves.
            rope = "halves (transformers)"
            metadata = {
                "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
                "architecture": str(model.config.model_type), "text": source, "text_sha256": digest,
                "tokens": str(len(ids)), "bos": "false", "heads": heads or f"0-{n_heads - 1}",
                "model_layers": str(n_layers), "model_heads": str(n_heads), "model_kv_heads": str(n_kv),
                "rope": rope, "producer": f"attlas with transformers {transformers.__version__}",
            }  # fmt: skip
            return recorded.trace(f"{metadata['model']} reading {os.path.basename(source)}", metadata)
    finally:
        model.train(was_training)


__all__ = ["StreamCache", "interval_mask", "record", "register", "stats", "use"]
