"""CKP: build_model on checkpoints that other runs wrote.

CKP-07  of a compiled model, whose names have a prefix
CKP-08  in bf16, on CPU
CKP-09  of an older model without the newer parameters (should)
"""

import dataclasses
import inspect

import torch

from nanochat_gate import Unsupported, requirement, verify
from suites.att.calls import words
from suites.att.models import logits, randomised, tokens
from suites.ckp.saved import manager, save
from suites.ckp.test_resume import folder
from suites.steps import FLOAT32

# What a model lacks that was saved before these came, and the value at which they do nothing.
NEWER = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}


class Tokenizer:
    """As many tokens as the model, which is all that build_model asks."""

    def __init__(self, size):
        self.size = size

    def get_vocab_size(self):
        return self.size


def built(rank, place, how, claimed):
    """Logits of a model, and of what build_model makes of its checkpoint, saved as `how` says."""
    module = manager(rank)
    if not hasattr(module, "build_model"):
        raise Unsupported("checkpoint_manager.py has no build_model")
    model = randomised(rank, n_layer=2)
    config = dataclasses.asdict(model.config)
    state = dict(model.state_dict())
    if how == "older":
        missing = [name for name in NEWER if name in state]
        if not missing:
            raise Unsupported("the model has no parameters that older checkpoints lack")
        for name in missing:
            torch.nn.init.constant_(model.get_parameter(name), NEWER[name])
            del state[name]
    elif how == "compiled":
        state = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    elif how == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    idx = tokens(rank, 2, 24)
    try:
        want = logits(rank, model, idx)
    except Exception as error:
        if claimed:
            raise
        raise Unsupported(f"its model does not run in fp32 on cpu: {words(error)}") from error
    save(rank, place, 7, state, None, {"model_config": config})
    module.get_tokenizer = lambda *_, **__: Tokenizer(config["vocab_size"])
    arguments = [place, 7, torch.device("cpu"), "eval"]
    made, *rest = module.build_model(*arguments[: len(inspect.signature(module.build_model).parameters)])
    return {"want": want, "got": logits(rank, made, idx), "training": made.training, "step": rest[-1].get("step")}


def verify_built(ranks, how, name):
    if "cpu" not in ranks.facts.claims and ranks.facts.modules.get("gpt") != "ok":
        raise Unsupported("the target's gpt.py cannot be imported")
    claimed = "cpu" in ranks.facts.claims
    said = ranks(built, folder(ranks, how), how, claimed, size=1, group=None, torchrun=False, env=FLOAT32, fresh=True)
    want, got = said[0]["want"], said[0]["got"]
    apart = (want - got).abs().max().item()
    # A target may go on computing in the checkpoint's bf16, a few roundings of 2^-8; other weights are other logits.
    right = torch.equal(want, got) or (how == "bf16" and apart <= 2**-4 * want.abs().max().item())
    verify(right, f"build_model gives the model {name}", f"its logits differ by up to {apart:.3g}")
    verify(not said[0]["training"], 'phase "eval" gives a model in eval mode', "it is in training mode")


@requirement("CKP-07", "A compiled model's checkpoint loads")
def test_compiled(ranks):
    """Names that keep a compiler's prefix, or lose letters with it, leave weights at their start values or fail."""
    verify_built(ranks, "compiled", "that was saved with the prefix _orig_mod.")


@requirement("CKP-08", "A bf16 checkpoint loads on CPU and computes what it holds")
def test_bf16(ranks):
    """What was trained on a GPU is sampled and evaluated on CPUs."""
    verify_built(ranks, "bf16", "whose weights were saved in bfloat16")


@requirement("CKP-09", "A checkpoint from before the newer parameters loads", level="should")
def test_older(ranks):
    """A model that took weeks cannot be read any more after an update."""
    verify_built(ranks, "older", "with the newer parameters at values that do nothing")
