"""Llama, plain or tensor parallel, sharded by FSDP2 from the meta device, is Llama on one rank."""

import pytest


@pytest.mark.parametrize(("tensor", "tied"), [(2, False), (2, True), (1, False)])
def test_fsdp2_from_meta(ranks, tensor, tied):
    """Of the same weights, bit for bit; how they train is the examples' to show."""
    script = f"""
    import torch
    from ezpz import count_flops
    from ezpz.models import Llama, LlamaConfig, ModelError, huggingface_state_dict
    from ezpz_dist import setup_torch, wrap_model_for_fsdp2, cleanup
    setup_torch(tensor_parallel_size={tensor})
    config = LlamaConfig(dim=64, layers=2, heads=8, kv_heads=4, hidden=96, tie_embeddings={tied})
    how = dict(parallel={tensor > 1}, sequence_parallel={tensor > 1})
    direct, model = Llama(config, **how), Llama(config, device="meta", **how)
    model = wrap_model_for_fsdp2(model)
    pairs = zip(model.named_parameters(), direct.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name and torch.equal(one.full_tensor(), other), name
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    losses = [each(tokens[:, :-1], tokens[:, 1:]) for each in (model, direct)]
    torch.testing.assert_close(*losses)
    losses[0].backward()
    units = {{name for name, one in model.named_modules() if type(one).__name__.startswith("FSDP")}}
    assert {{"layers.0", "layers.1"}} <= units
    # What is tied is left to the root.
    assert ({{"embed_tokens", "lm_head"}} <= units) is not {tied}
    for call in (huggingface_state_dict, lambda model: count_flops(model, tokens)):
        try:
            call(model)
        except (ModelError, ValueError) as error:
            print(error)
    cleanup()
    """
    for said in ranks(2 * tensor, script):
        files, operations = said.splitlines()
        assert files.startswith("embed_tokens.weight is sharded by FSDP2; expected"), said
        assert operations.startswith("count_flops: embed_tokens.weight is sharded; expected"), said


def test_positions_stay_exact_in_mixed_precision(ranks):
    """FSDP2 casts what it gives to a block; not what turns its features."""
    script = """
    from ezpz.models import Llama, LlamaConfig
    from ezpz_dist import setup_torch, wrap_model_for_fsdp2, cleanup
    setup_torch()
    model = wrap_model_for_fsdp2(Llama(LlamaConfig(dim=64, layers=1, heads=4)), dtype="bf16")
    seen = []
    model.layers[0].self_attn.register_forward_pre_hook(lambda module, given: seen.extend(given))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    print(model(tokens, tokens).dtype, seen[0].dtype, seen[1].cos.dtype)
    cleanup()
    """
    assert ranks(2, script) == ["torch.float32 torch.bfloat16 torch.float32\n"] * 2
