# %% [markdown]
# # One sum, three ways
#
# Four ranks train one model; each step sums their gradients. The naive driver collects all of them on rank 0 and sends
# the sum to each rank; the tree halves the number of senders in each round; the ring cuts the gradient into four
# pieces, which pass from neighbour to neighbour. The sum is the same, and so are the losses; the costs are not.

# %%
import hpcdl

STEPS = 40
runs = {
    name: hpcdl.launch(
        "train-allreduce", ranks=4, data="digits", model="mlp", allreduce=name, steps=STEPS, seed=1, show=False
    )
    for name in ("naive", "tree", "ring")
}
for name, run in runs.items():
    print(f"{name:6} test loss {run.summary['test_loss']:.4f}")
# > naive  test loss 0.8141
# > tree   test loss 0.8141
# > ring   test loss 0.8141

# %% [markdown]
# What each rank sent in a step. A gradient of the model, n = 9,610 numbers of 4 bytes, has 38,440 bytes. The driver
# sends p - 1 = 3 of them, in 3 messages; in the ring, each rank sends 2 (p - 1) = 6 messages of n / p numbers.

# %%
for name, run in runs.items():
    traffic = [rank["all_reduce"] for rank in run.summary["traffic_per_rank"]]
    print(
        f"{name:6} bytes {[each['bytes'] // STEPS for each in traffic]}, "
        f"messages {[each['messages'] // STEPS for each in traffic]}"
    )
# > naive  bytes [115320, 38440, 38440, 38440], messages [3, 1, 1, 1]
# > tree   bytes [76880, 38440, 76880, 38440], messages [2, 1, 2, 1]
# > ring   bytes [57660, 57664, 57660, 57656], messages [6, 6, 6, 6]

# %% [markdown]
# The busiest rank bounds the time of a step on a network: its bytes, in gradients.

# %%
gradient = 4 * runs["ring"].summary["parameters"]
for name, run in runs.items():
    most = max(rank["all_reduce"]["bytes"] for rank in run.summary["traffic_per_rank"])
    print(f"{name:6} {most / STEPS / gradient:.2f} gradients")
# > naive  3.00 gradients
# > tree   2.00 gradients
# > ring   1.50 gradients

# %% [markdown]
# The pages of each algorithm (docs/allreduce/) have its steps, drawn, and its costs for any number of ranks.
