"""What a Llama adds to prompts: transformers' tokens, on one rank and on several."""

import pytest
import torch

import ezpz_tp
from ezpz.models import Llama, LlamaConfig, ModelError, generate, load_huggingface
from ezpz_tp.testing import run_ranks

transformers = pytest.importorskip("transformers", reason="the extra huggingface")

PROMPTS = [list(range(3, 43)), [7, 9, 11], [130], list(range(100, 120))]
EVEN = [row[:3] * 4 for row in (PROMPTS[0], PROMPTS[3])]


def ours(folder, **options):
    model = Llama(LlamaConfig.from_huggingface(folder), **options)
    load_huggingface(model, folder)
    return model


def theirs(folder, prompts, **options):
    """What transformers adds, prompts padded on their left as it wants them."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    seen = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(tokens, attention_mask=seen, **how)[:, longest:]


@pytest.mark.parametrize("prompts", [PROMPTS, EVEN], ids=["unequal", "equal"])
def test_the_tokens_are_theirs(folder, prompts):
    found = generate(ours(folder), prompts, max_new_tokens=24)
    assert len(found.unique()) > 10
    assert torch.equal(found, theirs(folder, prompts))


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}])
def test_what_is_drawn_is_theirs(folder, options):
    """Of the same generator."""
    how = {"temperature": 1.5, **options}
    torch.manual_seed(1)
    wanted = theirs(folder, PROMPTS, do_sample=True, **{"top_k": 0, **how})
    torch.manual_seed(1)
    assert torch.equal(generate(ours(folder), PROMPTS, max_new_tokens=24, **how), wanted)


@pytest.mark.parametrize("prompts", [PROMPTS, EVEN], ids=["unequal", "equal"])
def test_the_logits_are_those_without_a_cache(folder, prompts):
    model, seen = ours(folder), []
    hook = model.lm_head.register_forward_hook(lambda *given: seen.append(given[2]))
    added = generate(model, prompts, max_new_tokens=12)
    hook.remove()
    for row, prompt in enumerate(prompts):
        whole = model(torch.cat([torch.tensor(prompt), added[row, :-1]])[None])[0, -12:]
        torch.testing.assert_close(torch.cat([each[row] for each in seen]), whole)


def test_a_row_ends_at_its_first_eos(folder):
    model = ours(folder)
    free = generate(model, PROMPTS, max_new_tokens=24)
    ends = [free[0, 5].item(), free[1, 2].item()]
    found = generate(model, PROMPTS, max_new_tokens=24, eos=ends)
    for row, one in enumerate(free.tolist()):
        last = min([one.index(end) for end in ends if end in one], default=23)
        assert found[row].tolist() == one[: last + 1] + ends[:1] * (23 - last)
    # All of them have ended: the model is called no more.
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    found = generate(model, PROMPTS[:1], max_new_tokens=24, eos=ends[0])
    assert len(calls) == free[0].tolist().index(ends[0]) + 1
    assert (found[0, len(calls) :] == ends[0]).all()


def on_a_rank(folder, options, how):
    model = ours(folder, parallel=True, **options)
    torch.manual_seed(ezpz_tp.get_tensor_parallel_rank())
    found = generate(model, PROMPTS, max_new_tokens=24, **how)
    tokens = torch.arange(100)[None]
    loss = model.loss(tokens, tokens).item()  # as before, also where sequences are shared
    return found, loss, ezpz_tp.get_tensor_parallel_rank()


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_tensor_parallel_ranks_add_the_tokens_of_one(folder, options):
    """131 tokens over two ranks: the vocabulary is padded."""
    model, tokens = ours(folder), torch.arange(100)[None]
    for how in ({}, {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 5}):
        wanted = generate(model, PROMPTS, max_new_tokens=24, **how)
        assert torch.equal(wanted, generate(model, PROMPTS, max_new_tokens=24, **how))
        for found, loss, _ in run_ranks(on_a_rank, 2, folder, options, how):
            assert torch.equal(found, wanted)
            assert loss == pytest.approx(model.loss(tokens, tokens).item(), abs=1e-5)
    assert not torch.equal(wanted, generate(model, PROMPTS, max_new_tokens=24, **how | {"seed": 6}))


def test_ranks_whose_generators_differ_agree(folder):
    one, other = run_ranks(on_a_rank, 2, folder, {}, {"temperature": 2.0})
    assert torch.equal(one[0], other[0])


def test_sharded_compiled_and_trained(ranks):
    """Rank 0's rows end at once, rank 1's never; the next forward has the new weights."""
    script = """
    import torch
    from ezpz.models import Llama, LlamaConfig, generate
    from ezpz_dist import cleanup, setup_torch, wrap_model_for_ddp, wrap_model_for_fsdp2
    rank = setup_torch()
    config = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, tie_embeddings=True)
    prompts = [[1 + rank, 2, 3], [4]]
    compiled = dict(backend="aot_eager", fullgraph=True)
    for wrap, how in ((wrap_model_for_fsdp2, compiled), (wrap_model_for_ddp, False)):
        plain, model = Llama(config), wrap(Llama(config), compile=how)
        for rate in (0.5, 0.5):
            for each in (plain, model):
                optimizer = torch.optim.SGD(each.parameters(), lr=rate)
                each(torch.arange(32)[None], torch.arange(1, 33)[None]).backward()
                if each is model:
                    generate(model, prompts, max_new_tokens=2)
                optimizer.step()
                optimizer.zero_grad()
            first = generate(plain, prompts, max_new_tokens=1)[:, 0].tolist()
            end = None if rank else first
            found = generate(model, prompts, max_new_tokens=8, eos=end)
            assert torch.equal(found, generate(plain, prompts, max_new_tokens=8, eos=end)), found
    cleanup()
    """
    ranks(2, script)


CONFIG = LlamaConfig(dim=64, layers=2, heads=4, max_seq_len=16)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (
            [[1] * 9],
            {},
            "a prompt of 9 tokens and max_new_tokens=8; expected at most max_seq_len=16",
        ),
        ([[1], []], {}, r"prompt 1 is \[\]; expected at least one token"),
        (["text"], {}, "prompt 0 is 'text'; expected at least one token, as the tokenizer"),
        ([], {}, "no prompts"),
        ([[[1, 2]]], {}, r"prompt 0 is \[\[1, 2\]\]; expected whole numbers, 0 to 255"),
        ([[0.5]], {}, r"prompt 0 is \[0.5\]; expected whole numbers"),
        ([[1, 256]], {}, r"prompt 0 is \[1, 256\]; expected .* the model's own tokenizer"),
        ([[-1, 2]], {}, r"prompt 0 is \[-1, 2\]"),
        ([[1]], {"max_new_tokens": 0}, r"max_new_tokens=0\); expected at least 1"),
        ([[1]], {"temperature": -1.0}, r"temperature=-1.0\); expected 0"),
        ([[1]], {"temperature": 1.0, "top_k": 0}, r"top_k=0\); expected at least 1"),
        ([[1]], {"temperature": 1.0, "top_p": 1.5}, r"top_p=1.5\); expected more than 0"),
        ([[1]], {"top_k": 5}, r"temperature=0.0\); expected more than 0 with top_k or top_p"),
    ],
)
def test_what_does_not_fit_is_refused(prompts, options, words):
    with pytest.raises(ModelError, match=words):
        generate(Llama(CONFIG), prompts, **{"max_new_tokens": 8, **options})


def test_models_that_cannot_are_refused(folder):
    def shared():
        generate(Llama(CONFIG, parallel=True), [[1]], max_new_tokens=1)

    with pytest.raises(ModelError, match="whose sequences 2 context-parallel ranks share"):
        run_ranks(shared, 2, context=2)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    for other, words in (
        (Llama(CONFIG, layers=[0]), "a pipeline's stage, of 1 of 2 layers"),
        (Llama(CONFIG, first=False), "a pipeline's stage"),
        (model, r"LlamaForCausalLM has its own way to generate; call model.generate"),
        (torch.nn.Linear(2, 2), "Linear; expected a Llama of ezpz.models"),
    ):
        with pytest.raises(ModelError, match=words):
            generate(other, [[1]], max_new_tokens=1)
