"""Faults of the evaluation, each with the ids that must catch it."""

from tests.faults.edit import Edit, Fault

FILE = "nanochat/loss_eval.py"
FUNCTION = "evaluate_bpb"

FAULTS = [
    Fault(
        "own-share-only",
        "Every rank reports its own share; rank 0's is taken for all.",
        Edit(FILE, FUNCTION, "is_ddp_initialized()", "False"),
        ids=("EVL-01",),
    ),
    Fault(
        "bytes-of-one-rank",
        "The nats of all ranks over the bytes of one.",
        Edit(FILE, FUNCTION, "dist.all_reduce(total_bytes)", "pass"),
        ids=("EVL-01",),
    ),
    Fault(
        "nats-averaged",
        "The score falls as ranks are added.",
        Edit(FILE, FUNCTION, "dist.all_reduce(nats)", "dist.all_reduce(nats); nats /= dist.get_world_size()"),
        ids=("EVL-01",),
    ),
    Fault(
        "log-two-forgotten",
        "Nats per byte under the name of bits.",
        Edit(FILE, FUNCTION, "math.log(2) * total_bytes.item()", "total_bytes.item()"),
        ids=("EVL-01",),
    ),
    Fault(
        "special-tokens-counted",
        "The nats of tokens without bytes count.",
        Edit(FILE, FUNCTION, "torch.where(size > 0, loss, 0.0).sum()", "loss.sum()"),
        ids=("EVL-02",),
    ),
    Fault(
        "ignored-as-token-zero",
        "Ignored targets count the bytes of the vocabulary's last token.",
        Edit(FILE, FUNCTION, "torch.where(y >= 0, token_bytes[y.clamp_min(0)], 0)", "token_bytes[y]"),
        ids=("EVL-02",),
    ),
    Fault(
        "zero-for-nothing",
        "An evaluation of nothing has the best score there is.",
        Edit(FILE, FUNCTION, "return math.inf", "return 0.0"),
        ids=("EVL-03",),
    ),
    Fault(
        "leaves-early",
        "A rank without bytes skips the collective and the others wait for it.",
        Edit(FILE, FUNCTION, "is_ddp_initialized()", "is_ddp_initialized() and total_bytes > 0"),
        ids=("EVL-04",),
        hangs=True,
    ),
    Fault(
        "graph-recorded",
        "Every evaluation holds the activations of a training step.",
        Edit(
            FILE,
            FUNCTION,
            "itertools.islice(batches, steps)",
            "(torch.set_grad_enabled(True), itertools.islice(batches, steps))[1]",
        ),
        ids=("EVL-05",),
    ),
]
