"""Generation with a KV cache: the cache that a decoding model reads and writes, and the loop around it."""

import torch

from nanochat import common


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


def sample_next(logits, generator, temperature=1.0, top_k=None):
    """Draw a token id for each row of logits (B, vocab_size): (B,) int64. Temperature 0 takes the likeliest.

    top_k: only the k likeliest tokens can come out.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: expected 0 or more.")
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None and top_k > 0:
        least = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator).squeeze(-1)


class Engine:
    """Generates token sequences: the prompt goes through the model once, each further token costs one position."""

    def __init__(self, model, tokenizer):
        self.model = model
        self.tokenizer = tokenizer

    def _cache(self, rows, positions):
        config = self.model.config
        return KVCache(
            batch_size=rows,
            num_heads=config.n_kv_head,
            seq_len=positions,
            head_dim=config.n_embd // config.n_head,
            num_layers=config.n_layer,
            device=self.model.get_device(),
            dtype=common.COMPUTE_DTYPE,
        )

    def _ends(self):
        """Ids that end a text."""
        return {self.tokenizer.get_bos_token_id(), self.tokenizer.encode_special("<|assistant_end|>")}

    @torch.inference_mode()
    def generate(self, tokens, num_samples=1, max_tokens=None, temperature=1.0, top_k=None, seed=42):
        """Yield (token column, masks) position by position: two lists of num_samples ints; mask 1 is a sampled token.

        tokens: the prompt, a list of ids, at least one. Ends when every sample has had an end token, after max_tokens
        columns, or where the model's sequence_len is full if max_tokens is None.
        """
        if not tokens or not isinstance(tokens[0], int):
            raise ValueError("The prompt is empty or no list of ids: start it with the BOS token.")
        if max_tokens is None:
            max_tokens = max(0, self.model.config.sequence_len - len(tokens))
        device = self.model.get_device()
        generator = torch.Generator(device=device).manual_seed(seed)
        prompt = self._cache(1, len(tokens))
        logits = self.model(torch.tensor([tokens], device=device), kv_cache=prompt)[:, -1]
        cache = self._cache(num_samples, len(tokens) + max_tokens)
        cache.prefill(prompt)
        logits = logits.expand(num_samples, -1)
        running, ends = set(range(num_samples)), self._ends()
        for left in reversed(range(max_tokens)):
            column = sample_next(logits, generator, temperature, top_k)
            ids = column.tolist()
            yield ids, [1] * num_samples
            running = {row for row in running if ids[row] not in ends}
            if not running or not left:
                return
            logits = self.model(column[:, None], kv_cache=cache)[:, -1]

    def generate_batch(self, tokens, num_samples=1, **kwargs):
        """(sequences, masks): num_samples lists of ids with the prompt and without the end token; mask 0 is the prompt.

        Takes the arguments of generate().
        """
        sequences = [list(tokens) for _ in range(num_samples)]
        masks = [[0] * len(tokens) for _ in range(num_samples)]
        running, ends = set(range(num_samples)), self._ends()
        for column, marks in self.generate(tokens, num_samples, **kwargs):
            running = {row for row in running if column[row] not in ends}
            for row in running:
                sequences[row].append(column[row])
                masks[row].append(marks[row])
        return sequences, masks
