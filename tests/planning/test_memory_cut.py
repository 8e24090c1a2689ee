"""Models that are cut: what is foretold is what each rank holds, by schedule, recomputation and the stage of ZeRO."""

import pytest

GPT = "--model gpt:layers=2,width=32,heads=4 --data text --steps 3 --batch-size 8"
OWN = GPT.replace("heads=4", "heads=4,head=own").replace("--steps 3", "--steps 12")
DEEPSEEK = GPT.replace("gpt:", "llama:latent=16,query-latent=24,units=32,experts=4,capacity=1,shared=1,dense=1,")
DROPLESS = DEEPSEEK.replace("capacity=1,", "")  # a rank's experts get other rows than another's: as the run found
MLP = "--model mlp:64,32,32 --steps 3"
CASES = [  # ranks, program, options
    (3, "pipeline", GPT),
    (2, "pipeline", f"{GPT} --schedule interleaved --chunks 2"),
    (3, "pipeline", f"{OWN} --schedule pipedream"),  # which stashes weights
    (3, "pipeline", f"{GPT} --schedule zb-h2 --microbatches 6"),
    (2, "pipeline", f"{GPT} --schedule zb-v --microbatches 4"),
    (2, "tensor-parallel", f"{GPT} --sequence-parallel"),
    (3, "fully-sharded", f"{GPT} --stage 3 --optimizer adam"),
    (4, "grid", f"{GPT} --grid data=2,tensor=2 --optimizer muon"),
    (4, "grid", f"{DROPLESS} --grid data=2,expert=2 --stage 1 --recompute"),
    (4, "grid", f"{DEEPSEEK} --grid data=2,context=2 --stage 1"),
]
LONG = [
    (2, "model-parallel", f"{GPT} --accumulate 2"),
    (2, "tensor-parallel", MLP),
    (3, "fully-sharded", f"{GPT} --stage 2 --accumulate 2"),
    (4, "grid", f"{GPT} --grid data=2,pipeline=2 --stage 3"),
    (4, "grid", f"{GPT} --grid pipeline=2,tensor=2 --sequence-parallel --average"),
    (4, "grid", f"{MLP} --grid data=2,pipeline=2 --stage 1"),
    (4, "grid", f"{DEEPSEEK} --grid expert=2,tensor=2 --sequence-parallel --optimizer muon"),
    (3, "pipeline", "--model mlp:64,32,32,64,32 --steps 3 --schedule zb-h1 --microbatches 6"),
    (4, "grid", f"{GPT} --grid data=2,pipeline=2 --stage 2 --schedule zb-h1"),
    (2, "pipeline", f"{GPT} --schedule dualpipe-v --microbatches 4"),
    (2, "pipeline", f"{GPT} --schedule gpipe"),
    (2, "pipeline", f"{GPT} --schedule naive --recompute"),
    (2, "tensor-parallel", f"{GPT} --optimizer adam"),
    (3, "fully-sharded", f"{GPT} --stage 1"),
    (3, "fully-sharded", f"{GPT} --stage 3 --gather broadcast"),
]
LONG = [pytest.param(*each, marks=pytest.mark.long) for each in LONG]


@pytest.mark.parametrize("ranks, program, options", [*CASES, *LONG])
def test_a_run_holds_what_is_foretold(foretold, ranks, program, options):
    foretold(ranks, f"train-{program}", *options.split())


def test_outputs_that_are_made_anew_stay_until_they_have_left(foretold):
    foretold(2, "train-pipeline", *GPT.split(), "--schedule", "gpipe", "--recompute", at_most=True)


NET = """from torch import nn


def net(features, classes, width=24):
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)]
    return nn.Sequential(nn.Flatten(), *layers)


class Skip(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x):
        x = self.one(x.flatten(1)).relu()
        return self.head(x + self.two(x).tanh())


def skip(classes):
    return Skip(classes)
"""


MODULES = [(f"train-{name}", "net") for name in ("allreduce", "pipeline", "fully-sharded")]


@pytest.mark.parametrize("program, model", [*MODULES, ("train-fully-sharded", "skip")])
def test_modules_of_pytorch(foretold, tmp_path, monkeypatch, program, model):
    pytest.importorskip("torch")
    (tmp_path / "planned_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    foretold(2, program, "--model", f"torch:planned_net:{model}", "--steps", "3")
