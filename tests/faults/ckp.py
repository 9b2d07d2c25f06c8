"""Faults of checkpoints, each with the ids that must catch it."""

from tests.faults.edit import Edit, Fault

FILE = "nanochat/checkpoint_manager.py"

FAULTS = [
    Fault(
        "shard-of-rank-0-for-all",
        "Every rank resumes with rank 0's moments.",
        Edit(
            FILE,
            "load_checkpoint",
            'path = _path(checkpoint_dir, "optim", step, rank)',
            'path = _path(checkpoint_dir, "optim", step, 0)',
        ),
        ids=("CKP-01",),
    ),
    Fault(
        "optimizer-forgotten",
        "Moments start at zero after every resume.",
        Edit(
            FILE,
            "load_checkpoint",
            "optimizer_data = _load(path, device)",
            "optimizer_data = _load(path, device); optimizer_data['state'] = {}",
        ),
        ids=("CKP-01",),
    ),
    Fault(
        "weights-saved-in-bf16",
        "A resume rounds the master weights.",
        Edit(
            FILE,
            "save_checkpoint",
            "torch.save(model_data, file)",
            "torch.save({n: t.bfloat16() for n, t in model_data.items()}, file)",
        ),
        ids=("CKP-01",),
    ),
    Fault(
        "folder-by-rank-0",
        "Other ranks save into a folder that rank 0 has yet to make.",
        Edit(
            FILE,
            "save_checkpoint",
            "os.makedirs(checkpoint_dir, exist_ok=True)",
            "rank == 0 and os.makedirs(checkpoint_dir, exist_ok=True)",
        ),
        Edit(FILE, "save_checkpoint", "_barrier()", "pass", nth=1),
        ids=("CKP-04",),
        trains=False,
    ),
    Fault(
        "folder-made-twice",
        "Two ranks make the folder and one of them fails.",
        Edit(
            FILE,
            "save_checkpoint",
            "os.makedirs(checkpoint_dir, exist_ok=True)",
            "os.path.exists(checkpoint_dir) or os.makedirs(checkpoint_dir)",
        ),
        ids=("CKP-04",),
        trains=False,
    ),
    Fault(
        "steps-as-text",
        "A run resumes from step 999 for ever.",
        Edit(FILE, "find_last_step", "steps[-1]", "max(steps, key=str)"),
        ids=("CKP-05", "CKP-12"),
    ),
    Fault(
        "strays-crash",
        "A file made by hand, and no checkpoint loads.",
        Edit(
            FILE,
            "_steps",
            "steps = {int(match[1]) for match in found if match}",
            'steps = {int(n[5:-5]) for n in names if n.startswith("meta_")}',
        ),
        ids=("CKP-06",),
    ),
    Fault(
        "prefix-kept",
        "A compiled model's checkpoint does not load.",
        Edit(FILE, "build_model", 'name.removeprefix("_orig_mod.")', "name"),
        ids=("CKP-07",),
    ),
    Fault(
        "prefix-letters-stripped",
        "Names that begin with letters of the prefix lose them.",
        Edit(FILE, "build_model", 'name.removeprefix("_orig_mod.")', 'name.lstrip("_orig_mod.")'),
        ids=("CKP-07",),
    ),
    Fault(
        "older-refused",
        "A model from before the newer parameters cannot be read any more.",
        Edit(FILE, "build_model", "_complete(weights, config)", "pass"),
        ids=("CKP-09",),
    ),
    Fault(
        "older-with-zeros",
        "An older model computes with its residual stream switched off.",
        Edit(FILE, "_complete", "torch.ones(config.n_layer)", "torch.zeros(config.n_layer)"),
        ids=("CKP-09",),
    ),
    Fault(
        "meta-first",
        "A run killed while it saves leaves a checkpoint that is found and is half there.",
        Edit(FILE, "_write", 'open(path + ".partial", "wb")', 'open(path, "wb")'),
        Edit(FILE, "_write", 'os.replace(path + ".partial", path)', "pass"),
        Edit(FILE, "_steps", r're.fullmatch(r"meta_(\d+)\.json", name)', r're.fullmatch(r"model_(\d+)\.pt", name)'),
        ids=("CKP-10",),
    ),
    Fault(
        "any-world-size",
        "Shards of another world size load without a word.",
        Edit(FILE, "load_checkpoint", "saved != here", "False"),
        ids=("CKP-11",),
    ),
    Fault(
        "muon-state-beside-the-optimizers",
        "Muon's state is an attribute that state_dict() does not know of, and starts from nothing after a resume.",
        Edit(
            "nanochat/optim.py",
            "MuonAdamW._muon",
            "self.state[p]",
            "self.__dict__.setdefault('muon_state', {}).setdefault(p, {})",
        ),
        ids=("CKP-01",),
    ),
]
