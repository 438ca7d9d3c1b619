"""Main functions of the two ranks of a trainer, for a `FarProcess` on each of two hosts.
They import PyTorch themselves: whoever starts them imports this module, too, and needs no PyTorch."""


def made_batches() -> list:
    "Unequal lengths, and a batch of one row, of which the second rank has nothing."
    from small_trainers import made_groups

    return [made_groups(4, 4, noise=0.3, seed=1), made_groups(1, 1, seed=2), made_groups(3, 4, noise=0.3, seed=3)]


def lead(connection, file: str, size: int, meeting) -> None:
    "Rank 0: train, write the weights to a file, and send the metrics."
    import torch
    from two_ranks import build, trained

    from rlbench.training.data_parallel import lead_ranks, whole_weights

    trainer, _ = build(lead_ranks(size, "cpu", meeting), "")
    metrics = trained(trainer, made_batches())
    torch.save(whole_weights(trainer), file)
    connection.send(metrics)
    connection.recv()  # the end


def follow(connection, size: int, meeting) -> None:
    "Rank 1: does what rank 0 says."
    import torch
    from two_ranks import build

    from rlbench.training.data_parallel import rank_main

    rank_main(connection, 1, size, torch.device("cpu"), meeting, build, ("",))
