"""Generation. For now the KV cache that a decoding model reads and writes."""

import torch


class KVCache:
    """Keys and values of every layer, for `batch_size` rows of up to `seq_len` positions.

    k_cache, v_cache: (num_layers, B, seq_len, num_heads, head_dim) in `dtype`; num_heads counts the k/v heads.
    cache_seqlens: (B,) int32, how many positions each row holds. prev_embedding: (B, 1, n_embd), the last position's
    normed embedding, which the model's smear needs for the next one; None while the cache is empty.
    """

    def __init__(self, batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype):
        self.batch_size = batch_size
        self.max_seq_len = seq_len
        self.n_layers = num_layers
        self.n_heads = num_heads
        self.head_dim = head_dim
        shape = num_layers, batch_size, seq_len, num_heads, head_dim
        self.k_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.v_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.cache_seqlens = torch.zeros(batch_size, device=device, dtype=torch.int32)
        self.prev_embedding = None

    def reset(self):
        """Empty the cache. Old keys stay in memory and are written over."""
        self.cache_seqlens.zero_()
        self.prev_embedding = None

    def get_pos(self):
        """The position at which the next token goes in, an int, the same in every row."""
        positions = self.cache_seqlens.tolist()
        if min(positions) != max(positions):
            raise ValueError(f"The rows of the cache stand at different positions, {positions}: decode them apart.")
        return positions[0]

    def get_layer_cache(self, layer_idx):
        """(k_cache, v_cache) of one layer, each (B, seq_len, num_heads, head_dim): views, to be written in place."""
        return self.k_cache[layer_idx], self.v_cache[layer_idx]

    def advance(self, num_tokens):
        """Count `num_tokens` more positions as held, in every row."""
        self.cache_seqlens += num_tokens

    def prefill(self, other):
        """Take over what `other` holds, copied to every row when `other` has one row.

        Raises ValueError when this cache is not empty or `other` does not fit in it.
        """
        if self.get_pos() != 0:
            raise ValueError(f"The cache already holds {self.get_pos()} positions: prefill a new one, or reset() it.")
        mine = self.n_layers, self.n_heads, self.head_dim
        theirs = other.n_layers, other.n_heads, other.head_dim
        if mine != theirs:
            raise ValueError(f"Caches of (layers, heads, head_dim) {mine} and {theirs} do not fit: make them equal.")
        if other.batch_size not in (1, self.batch_size):
            raise ValueError(f"A cache of {other.batch_size} rows cannot fill {self.batch_size}: use 1 or as many.")
        pos = other.get_pos()
        if pos > self.max_seq_len:
            raise ValueError(f"{pos} positions do not fit into a cache of {self.max_seq_len}: make it longer.")
        self.k_cache[:, :, :pos] = other.k_cache[:, :, :pos]
        self.v_cache[:, :, :pos] = other.v_cache[:, :, :pos]
        self.cache_seqlens.fill_(pos)
        if other.prev_embedding is not None:
            self.prev_embedding = other.prev_embedding.expand(self.batch_size, -1, -1).clone()
