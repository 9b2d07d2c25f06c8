"""Faults that only a run meets: of several micro-batches, with gradients of its own, or over more than a few steps."""

from tests.faults.edit import Edit, Fault

OPTIM = "nanochat/optim.py"
GPT = "nanochat/gpt.py"

LOSS = """F.cross_entropy(
    logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1, reduction=loss_reduction
)"""
SMEARED = "x = self._smear(x, kv_cache)"
WORLD = "torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1"


def after_embedding(code):
    return Edit(GPT, "GPT.forward", SMEARED, f"{SMEARED}\n{code}")


FAULTS = [
    # What ranks make of the data.
    Fault(
        "loss-divided-by-the-ranks",
        "The loss is divided for a sum over ranks that is an average: it falls with more GPUs, and gradients with it.",
        Edit(GPT, "GPT.forward", LOSS, f"{LOSS} / ({WORLD})"),
        ids=("TRN-01", "TRN-02"),
    ),
    Fault(
        "noise-on-every-rank",
        "Activations are dropped at random where there are several ranks, with seeds of their own.",
        after_embedding(f"x = torch.nn.functional.dropout(x, 0.02, training=({WORLD}) > 1)"),
        ids=("TRN-01", "TRN-02"),
    ),
    Fault(
        "only-the-last-micro-batch-counts",
        "A forward pass clears the gradients, so that of all accumulation steps only the last has an effect.",
        Edit(GPT, "GPT.forward", "T = idx.size(1)", "T = idx.size(1)\nself.zero_grad(set_to_none=True)"),
        ids=("TRN-01", "TRN-02", "TRN-04"),
    ),
    Fault(
        "gradients-clipped-before-the-average",
        "Each rank clips its own gradients, so that the average is not that of the batch.",
        Edit(
            OPTIM,
            "_grad",
            "p.grad.contiguous()",
            "p.grad.mul(1e-4 / p.grad.norm().clamp_min(1e-4)).contiguous()",
        ),
        ids=("TRN-02",),
    ),
    Fault(
        "loss-grows-with-the-rows",
        "The loss is summed over rows and divided by a fixed number of them: a larger micro-batch learns faster.",
        Edit(GPT, "GPT.forward", LOSS, f"{LOSS} * (idx.size(0) / 2)"),
        ids=("TRN-04",),
    ),
    # Rows that are not alone.
    Fault(
        "smear-across-rows",
        "The first token of a row gets a share of the row before it in the micro-batch.",
        after_embedding("x = x + 0.1 * x.roll(1, 0)"),
        ids=("TRN-07",),
    ),
    Fault(
        "embeddings-centred-over-the-micro-batch",
        "A mean over the micro-batch is taken off the embeddings, as in batch normalisation.",
        after_embedding("x = x - 0.1 * x.mean(dim=0, keepdim=True)"),
        ids=("TRN-07",),
    ),
    Fault(
        "noise-in-the-forward-pass",
        "A dropout nobody asked for: no run can be repeated, and none compared with another.",
        after_embedding("x = torch.nn.functional.dropout(x, 0.02, training=kv_cache is None)"),
        ids=("TRN-07",),
    ),
    # What happens late.
    Fault(
        "adamw-state-of-rank-1-lost-after-8-steps",
        "One rank's averages start from nothing in the middle of a run; its rows of the embeddings jump.",
        Edit(OPTIM, "MuonAdamW._adamw", "not state", 'not state or (rank == 1 and state["step"] == 8)'),
        ids=("TRN-02",),
    ),
    Fault(
        "rate-of-rank-1-doubled-after-8-steps",
        "One rank's schedule is a step of its own; all ranks hold the same embeddings, of which its share is wrong.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            'state["step"] += 1',
            'state["step"] += 1\nlr = _t(group["lr"] * (2 if rank == 1 and state["step"] > 8 else 1))',
        ),
        ids=("TRN-02",),
    ),
    Fault(
        "bias-correction-stuck-on-rank-1",
        "One rank counts no further than eight steps, so that it corrects for a beginning that is long past.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            'state["step"] += 1',
            'state["step"] += state["step"] < 8 or rank != 1',
        ),
        ids=("TRN-02",),
    ),
    Fault(
        "small-parameters-not-averaged-after-8-steps",
        "Every rank goes on with its own gradients of the scalars, as after a bucket that is never flushed.",
        Edit(OPTIM, "_start_adamw", "grad = _grad(p)", "grad = _grad(p)\np.seen = getattr(p, 'seen', 0) + 1"),
        Edit(OPTIM, "_start_adamw", "N == 1", "N == 1 or (p.numel() < SMALL and p.seen > 8)"),
        ids=("TRN-05", "TRN-02"),
    ),
    Fault(
        "matrices-of-rank-1-not-copied-after-8-steps",
        "One rank keeps matrices that it should have replaced by what the others sent.",
        Edit(
            OPTIM,
            "MuonAdamW.step",
            "torch._foreach_copy_(params, list(stacked[: len(params)].unbind()))",
            "late = getattr(self, 'late', 0) + 1\nself.late = late\nif rank == 0 or late <= 48:\n"
            "    torch._foreach_copy_(params, list(stacked[: len(params)].unbind()))",
        ),
        ids=("TRN-05", "TRN-02"),
    ),
    Fault(
        "updates-stop-after-4-steps",
        "Nothing is learnt any more, and the loss stays where it is.",
        Edit(
            OPTIM,
            "MuonAdamW.step",
            "groups = [group for group in self.param_groups if group['params']]",
            "self.taken = getattr(self, 'taken', 0) + 1\nif self.taken > 4:\n    return\n"
            "groups = [group for group in self.param_groups if group['params']]",
        ),
        ids=("TRN-03",),
    ),
    Fault(
        "rate-grows-after-8-steps",
        "The learning rate grows in place with every step, and what was learnt is lost again.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            'state["step"] += 1',
            'state["step"] += 1\nlr = _t(group["lr"] * 3.0 ** max(state["step"] - 8, 0))',
        ),
        ids=("TRN-03",),
    ),
    # What nobody trains, and what everybody should not.
    Fault(
        "value-embeddings-in-no-group",
        "A table of embeddings is in no group of the optimizer and keeps its random values.",
        Edit(
            GPT,
            "GPT.setup_optimizer",
            "adamw(self.value_embeds.parameters(), embedding_lr * scale * 0.5, (0.8, 0.995), 0.01)",
            "adamw([], 0.0, (0.8, 0.995), 0.01)",
        ),
        Edit(
            GPT,
            "GPT.setup_optimizer",
            "sum(len(group['params']) for group in groups) == len(list(self.parameters()))",
            "True",
        ),
        ids=("TRN-08",),
    ),
    Fault(
        "embeddings-frozen-by-a-rate-of-zero",
        "The rate of the embeddings is scaled to nothing.",
        Edit(
            GPT,
            "GPT.setup_optimizer",
            "adamw(self.transformer.wte.parameters(), embedding_lr * scale, (0.8, 0.995), 0.001)",
            "adamw(self.transformer.wte.parameters(), embedding_lr * (scale // 768), (0.8, 0.995), 0.001)",
        ),
        ids=("TRN-08",),
        trains=False,
    ),
    Fault(
        "ignored-targets-count",
        "Masked targets count as token 0, which the model learns to write.",
        Edit(GPT, "GPT.forward", "targets.reshape(-1)", "targets.reshape(-1).clamp_min(0)"),
        ids=("TRN-09",),
    ),
    Fault(
        "loss-divided-by-masked-targets-too",
        "The mean is over all targets, masked ones too: a text with much masked hardly counts.",
        Edit(
            GPT,
            "GPT.forward",
            LOSS,
            f"{LOSS.replace('loss_reduction', repr('sum'))} / targets.numel() if loss_reduction == 'mean' else {LOSS}",
        ),
        ids=("TRN-09",),
    ),
    Fault(
        "flops-without-attention",
        "MFU is printed lower than it is, the more so the longer the context.",
        Edit(
            GPT,
            "GPT.estimate_flops",
            "12 * self.config.n_embd * self._keys_read(self.config.sequence_len)",
            "0",
        ),
        ids=("TRN-13",),
    ),
    Fault(
        "flops-with-embeddings",
        "Tables that are only looked up in count as products, and MFU is printed higher than it is.",
        Edit(
            GPT,
            "GPT.num_matmul_params",
            "sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))",
            "sum(p.numel() for p in self.parameters())",
        ),
        ids=("TRN-13",),
    ),
]
