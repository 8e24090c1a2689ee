"""Data parallel by PyTorch: a replica on each rank, gradients averaged while the backward pass computes them.

    mpiexec -n 4 python ddp.py

The program is as it would be over gloo, but for the line that is marked.
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpcdl.torch  # the line that changes, with the name below: init_process_group("gloo")


def points(number: int) -> TensorDataset:
    """Points of the plane, of two classes: within a circle, and without."""
    random = torch.Generator().manual_seed(1)
    x = 2 * torch.rand(number, 2, generator=random) - 1
    return TensorDataset(x, (x.square().sum(1) < 0.6).long())


def main() -> None:
    distributed.init_process_group("hpcdl")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = points(2000)
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in DataLoader(data, batch_size=50, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        distributed.all_reduce(total)
        if distributed.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}")
    if distributed.get_rank() == 0 and distributed.get_backend() == "hpcdl":
        print(f"{hpcdl.torch.traffic()['all_reduce']['calls']} all-reduces")
    del model  # before its group: over gloo the program may stand still otherwise
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
