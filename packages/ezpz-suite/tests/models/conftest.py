"""A Llama of transformers, with 131 tokens and grouped queries, and its folder of several files."""

import pytest
import torch

LONG = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip  # short enough that every frequency is kept, blended or divided within 100 tokens


def theirs(tied=False, rope=LONG):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied,
        **({"rope_parameters": rope} if rope else {}),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            # Larger than transformers draws them, so that nothing is nearly nothing; norms unlike.
            one.mul_(3) if "norm" not in name else one.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """As the hub has it, in several files."""
    place = tmp_path_factory.mktemp("huggingface")
    theirs().save_pretrained(place, max_shard_size="60KB")
    assert len(list(place.glob("*.safetensors"))) > 2
    return place
