"""nanochat for the CPU as well: the reference that the suites judge when no other checkout is named.

common            device, process group, compute dtype
flash_attention   one attention interface, the FlashAttention-3 kernel or torch's SDPA behind it
gpt               the model, its initial weights and its optimizer groups
optim             AdamW and Muon in one optimizer, sharded over the ranks
engine            the KV cache for generation
"""
