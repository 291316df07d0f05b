"""What ezpz.models' Llama is compared with on an accelerator is the same network."""

import accelerator
import torch
from raw_llama import RawLlama

from ezpz.models import Llama


def test_the_raw_llama_is_the_same_network():
    config = accelerator.Sizes.on("cpu").config
    ours, raw = Llama(config), RawLlama(config)
    raw.load_state_dict(ours.state_dict())
    tokens = torch.randint(config.vocab_size, (2, 16))
    losses = [model(tokens, tokens) for model in (ours, raw)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    theirs = dict(raw.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad)
