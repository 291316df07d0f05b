"""Adapters under DDP, FSDP2 and TP: the steps of one process, and checkpoints without the rest."""

BODY = """
import copy
from torch import nn
import ezpz_tp

rank = setup_torch(seed=3, timeout=60)  # ranks draw other numbers
WHERE = {where!r}

def build():
    block = [ezpz_tp.ColumnParallelLinear(64, 1024, gather_output=False, seed=1), nn.GELU(),
        ezpz_tp.RowParallelLinear(1024, 64, input_is_parallel=True, seed=2)]
    model = nn.Sequential(nn.Sequential(*block), nn.BatchNorm1d(64), nn.Linear(64, 64))
    seed_everything(3)
    return model.requires_grad_().double()

def adapted():
    model = build()
    with torch.no_grad():  # of the rank's own stream, unlike the others
        model[2].weight.fill_(0.1), model[2].bias.zero_()
    ezpz_tp.apply_lora(model, ("0.0", "0.2", "2"), rank=2, alpha=8)
    return model

def adam(model):
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)

def train(model, optimizer, steps, rows):
    losses = []
    for step in steps:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).double()
        loss = (model.eval()(batch[rows]) - 1).square().mean()
        loss.backward()
        ezpz_tp.finalize_grads(model)
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)

def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)

def trained_and_saved(kind, wrap, at, expected):
    "Train half of each batch; save what that made, and load it into the same wrapper."
    bare, path = adapted(), f"{WHERE}/{kind}"
    model = wrap(copy.deepcopy(bare))
    raises(ezpz_tp.ParallelError, "is wrapped already", ezpz_tp.apply_lora, model)
    optimizer = adam(model)
    found = train(model, optimizer, range(10), slice(at * 4, at * 4 + 4))
    near(all_reduce(found, "mean"), expected["losses"])
    near(ezpz_tp.lora_state_dict(model), expected["adapters"])
    save_checkpoint(path, model=model, optimizer=optimizer, step=10, frozen=False)
    ezpz_tp.save_lora(model, path + "-peft")
    again, filled = wrap(copy.deepcopy(bare)), wrap(copy.deepcopy(bare))
    load_checkpoint(path, model=again, optimizer=adam(again))
    ezpz_tp.load_lora(filled, path + "-peft")
    near(ezpz_tp.lora_state_dict(again), expected["adapters"])
    near(ezpz_tp.lora_state_dict(filled), expected["adapters"])
    return model
"""

TWO = """
alone = adapted()
first = ezpz_tp.lora_state_dict(alone)
torch.testing.assert_close(first, all_gather_object(first)[0], rtol=0, atol=0)
optimizer, every = adam(alone), slice(None)
expected = {"losses": train(alone, optimizer, range(10), every)}
expected["adapters"] = ezpz_tp.lora_state_dict(alone)
save_checkpoint(WHERE + "/whole", model=alone, optimizer=optimizer, step=10)
if rank == 0:
    later = {"later": train(alone, optimizer, range(10, 12), every)}
    torch.save(expected | later, WHERE + "/expected.pt")
for kind, wrap in (("ddp", wrap_model_for_ddp), ("fsdp2", wrap_model_for_fsdp2)):
    model = trained_and_saved(kind, wrap, rank, expected)
    sizes = [latest_checkpoint(f"{WHERE}/{name}").size for name in (kind, "whole")]
    assert sizes[0] < 0.35 * sizes[1], sizes  # with both moments of the optimizer
    assert latest_checkpoint(f"{WHERE}/{kind}").contents == ("trainable", "optimizer", "rng")
raises(ezpz_tp.ParallelError, "FSDP2 shards the model", ezpz_tp.merge_lora, model)
"""

FOUR = """
ezpz_tp.initialize_tensor_parallel(2)
at = ezpz_tp.get_data_parallel_rank()
trained_and_saved("tp", wrap_model_for_fsdp2, at, torch.load(WHERE + "/expected.pt"))
"""

ONE = """
expected, every = torch.load(WHERE + "/expected.pt"), slice(None)
for kind in ("ddp", "fsdp2", "tp"):
    path, model = f"{WHERE}/{kind}", adapted()
    optimizer = adam(model)
    assert load_checkpoint(path, model=model, optimizer=optimizer).step == 10
    near(ezpz_tp.lora_state_dict(model), expected["adapters"])
    near(train(model, optimizer, (10, 11), every), expected["later"])
    ezpz_tp.load_lora(bare := build(), path + "-peft")
    near(ezpz_tp.lora_state_dict(bare), expected["adapters"])
    # What is trained has to be in it.
    learns = adapted().requires_grad_()
    raises(CheckpointError, "8 tensors are not in it", load_checkpoint, path, model=learns)
"""


def test_ranks_train_and_save_what_one_loads(ranks, tmp_path):
    body = BODY.replace("{where!r}", repr(str(tmp_path)))
    ranks(2, body + TWO)
    ranks(4, body + FOUR)
    ranks(1, body + ONE)
