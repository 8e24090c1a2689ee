"""A model that is cut by FSDP2: each rank holds its part of every tensor, and a layer is whole only while it computes.

    mpiexec -n 4 python fsdp.py

The program is as it would be over gloo, but for the line that is marked.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hpcdl.torch  # noqa: F401  # the line that changes, with the name below: init_process_group("gloo")


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    distributed.init_process_group("hpcdl")
    torch.set_num_threads(1)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    for step in range(10):
        x = torch.randn(24, 8, generator=random)
        mine, y = x.chunk(size)[rank], x.sin().sum(1, keepdim=True).chunk(size)[rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(mine), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean, distributed.ReduceOp.AVG)
        if rank == 0 and step % 3 == 0:
            print(f"step {step}: loss {mean:.4f}")
    held = sum(each.to_local().numel() for each in model.parameters())
    whole = sum(each.numel() for each in model.parameters())
    if rank == 0:
        print(f"rank 0 holds {held} of {whole} parameters")
    del model, optimizer  # before their group: over gloo the program may stand still otherwise, or end with an abort
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
