"""Training of a few steps, as a script does it: would anybody notice that the checkout is broken?"""

STEPS = 6
FALL = 0.5  # nats; the reference falls by three, on a batch that it sees again and again


def losses(rank, steps):
    """This rank's loss before each of `steps` optimizer steps, on a batch of its own that stays the same."""
    import torch

    rank.rendezvous()
    rank.target.compute_init("cpu")
    model = rank.target.model(poison=False, n_layer=2)
    optimizers = rank.target.optimizers(model)
    generator = torch.Generator().manual_seed(rank.rank)
    batch_BT = torch.randint(0, 192, (4, 33), generator=generator)
    seen = []
    for _ in range(steps):
        loss = rank.target.loss(model, batch_BT[:, :-1], batch_BT[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        seen.append(loss.item())
    return seen
