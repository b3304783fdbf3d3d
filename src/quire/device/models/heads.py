"""Which heads run on a mesh, and which head of the model each of them is: `padding.py` explains why they differ."""

from dataclasses import replace

import numpy as np

from quire.config import AttentionConfig


def padded_attention(attention: AttentionConfig, num_devices: int) -> AttentionConfig:
    """The heads that run: as few KV heads on a device as possible, and with them as few query heads as possible."""
    K, G = attention.num_kv_heads, attention.group_size

    def heads_with(copies: int) -> tuple[int, int]:
        return -(-K * copies // num_devices), -(-G // copies)

    kv_heads_each, group_size = min(heads_with(copies) for copies in range(1, min(num_devices, G) + 1))
    num_kv_heads = kv_heads_each * num_devices
    num_heads, unpadded = num_kv_heads * group_size, (attention.num_heads, K)
    is_same = (num_heads, num_kv_heads) == unpadded
    return (
        attention
        if is_same
        else replace(attention, num_kv_heads=num_kv_heads, num_heads=num_heads, unpadded_heads=unpadded)
    )


def qkv_sources(public: AttentionConfig, padded: AttentionConfig) -> np.ndarray:
    """For each head of a padded `[K, G+2]` (query heads, key, value), the one of the public layout that it is.

    Where a group has a query head too few its last one stands in: what it adds is multiplied by zeros, and unlike zeros
    it cannot raise the largest magnitude by which a token is quantised.
    """
    width, G = public.group_size + 2, public.group_size
    heads = np.full((padded.num_kv_heads, padded.group_size + 2), public.num_kv_heads * width, np.int32)
    for row, (kv_head, queries) in zip(heads, _queries(public, padded), strict=False):
        row[:-2] = kv_head * width + np.minimum(queries, G - 1)
        row[-2:] = kv_head * width + G + np.arange(2)
    return heads.reshape(-1)


def output_sources(public: AttentionConfig, padded: AttentionConfig) -> np.ndarray:
    """For each query head that runs, the one of the public layout that it is; the number of them where it is none."""
    heads = np.full((padded.num_kv_heads, padded.group_size), public.num_heads, np.int32)
    for row, (kv_head, queries) in zip(heads, _queries(public, padded), strict=False):
        is_real = queries < public.group_size
        row[is_real] = kv_head * public.group_size + queries[is_real]
    return heads.reshape(-1)


def _queries(public: AttentionConfig, padded: AttentionConfig) -> list[tuple[int, np.ndarray]]:
    """For each KV head that runs and is not zeros: which one it is, and which of its query heads come with it."""
    copies, width = -(-public.group_size // padded.group_size), padded.group_size
    return [
        (kv_head, np.arange(copy * width, (copy + 1) * width))
        for kv_head in range(public.num_kv_heads)
        for copy in range(copies)
    ]


def unpadded(attention: AttentionConfig) -> AttentionConfig:
    """The heads of the model itself."""
    num_heads, num_kv_heads = attention.unpadded_heads or (attention.num_heads, attention.num_kv_heads)
    return replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads, unpadded_heads=None)


def key_sources(public: AttentionConfig, padded: AttentionConfig) -> np.ndarray:
    """For each KV head that runs, the one of the model that it is; the number of them where it is zeros."""
    heads = np.full(padded.num_kv_heads, public.num_kv_heads, np.int32)
    sources = [kv_head for kv_head, _ in _queries(public, padded)]
    heads[: len(sources)] = sources
    return heads
