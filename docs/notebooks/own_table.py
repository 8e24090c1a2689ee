# %% [markdown]
# # A table of one's own
#
# 344 penguins (docs/penguins.csv), with texts and missing values, become a data file; three ranks train on it.

# %%
import subprocess
import sys

import numpy as np

import hpcdl

prepare = "prepare-data csv docs/penguins.csv penguins.h5 --label species --missing median --force"
subprocess.run([sys.executable, "-m", "hpcdl", *prepare.split()], check=True)
run = hpcdl.launch("train-allreduce", ranks=3, data="penguins.h5", model="mlp:32", epochs=40, seed=1, show=False)
print(f"test accuracy {run.summary['test_accuracy']:.2f} after {run.summary['steps']} steps")
# > test accuracy 0.97 after 360 steps

# %% [markdown]
# New rows, of which one lacks its mass. The file of the run has what becomes of texts and missing values.

# %%
with open("new.csv", "w") as file:
    file.write("island,bill_length_mm,bill_depth_mm,flipper_length_mm,body_mass_g,sex,year\n")
    file.write("Dream,39.2,18.1,190,3500,female,2010\n")
    file.write("Biscoe,50.1,15.4,222,,male,2010\n")
new = run.predict("new.csv")
print(*new["classes"][new["prediction"]])
# > Adelie Gentoo

# %% [markdown]
# Arrays need no file: `launch` writes them beside the run. A fifth of the rows is kept for the test.

# %%
random = np.random.default_rng(0)
x = random.normal(size=(500, 4))
y = (x @ [1.0, -2.0, 0.5, 0.0] + 0.3 * random.normal(size=500) > 0).astype(int)
run = hpcdl.launch("train-allreduce", ranks=2, data=(x, y), model="mlp:16", epochs=30, seed=1, show=False)
print(f"test accuracy {run.summary['test_accuracy']:.2f}")
# > test accuracy 0.94
