"""Faults of the training script that only a whole run shows, each with the ids that must catch it."""

from tests.faults.edit import Edit, Fault

SCRIPT = "nanochat/scripts/base_train.py"

FAULTS = [
    Fault(
        "rank-0-saves-alone",
        "The other ranks' moments are lost at the first resume.",
        Edit(SCRIPT, "train", "optimizer.state_dict()", "optimizer.state_dict() if rank == 0 else None"),
        ids=("CKP-02",),
    ),
    Fault(
        "optimizer-not-resumed",
        "The script loads the weights and starts the moments anew.",
        Edit(SCRIPT, "prepare", "run.optimizer.load_state_dict(shard)", "pass"),
        ids=("CKP-03",),
    ),
    Fault(
        "schedule-starts-over",
        "A resumed run warms up again.",
        Edit(
            SCRIPT,
            "train",
            "set_schedule(optimizer, it, plan, args)",
            "set_schedule(optimizer, it - first_step, plan, args)",
        ),
        ids=("CKP-03",),
    ),
    Fault(
        "one-step-more",
        "A resumed run takes the step of its checkpoint again.",
        Edit(
            SCRIPT,
            "prepare",
            'args.resume_from_step, meta["dataloader_state_dict"]',
            'args.resume_from_step - 1, meta["dataloader_state_dict"]',
        ),
        ids=("CKP-03",),
    ),
    Fault(
        "rate-of-all-ranks",
        "The printed throughput doubles with the ranks.",
        Edit(
            SCRIPT, "train", "int(plan.batch_size / seconds)", "int(plan.batch_size * dist.get_world_size() / seconds)"
        ),
        ids=("TRN-11",),
    ),
    Fault(
        "seeded-by-rank-in-the-script",
        "Every rank starts from weights of its own.",
        Edit(SCRIPT, "prepare", "run.model.init_weights()", "(torch.manual_seed(rank), run.model.init_weights())"),
        ids=("TRN-10", "TRN-12"),
    ),
]
