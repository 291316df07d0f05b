"""Models of images: the vision and the diffusion transformer, its noise, the perceptron."""

import pytest
import torch

from ezpz.models import MLP, DiT, DiTConfig, ModelError, NoiseSchedule, VisionTransformer, ViTConfig
from ezpz_device import count_flops


def test_patches_are_the_image_cut_up():
    model = VisionTransformer(ViTConfig(image_size=8, patch_size=4, channels=2, dim=16))
    image = torch.arange(128.0).view(1, 2, 8, 8)
    tokens = model.patches(image)
    assert tokens.shape == (1, 4, 16)
    projection = model.patches.projection
    corner = (image[:, :, :4, 4:] * projection.weight).sum((1, 2, 3)) + projection.bias
    torch.testing.assert_close(tokens[0, 1], corner)


def test_layers_of_the_perceptron():
    model = MLP((64, 32, 16, 10))
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert sum(one.numel() for one in model.parameters()) == 64 * 32 + 32 + 32 * 16 + 16 + 170
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    by_hand = x
    for number, layer in enumerate(model.layers):
        by_hand = layer(by_hand)
        by_hand = by_hand.relu() if number < 2 else by_hand
    torch.testing.assert_close(model(x), by_hand)
    assert model(x).min() < 0, "no ReLU behind the last"


def test_at_first_it_predicts_no_noise():
    model = DiT(DiTConfig()).eval()
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    predicted = model(images, torch.tensor([0, 5, 9]), torch.tensor([0, 1, 10]))
    assert predicted.shape == images.shape
    assert not predicted.any()
    hidden = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.layers[0](hidden, torch.ones(3, 64)), hidden), "adaLN-Zero"


def test_pixels_go_back_where_they_came_from():
    """With a head that returns the patches' pixels in order, the image is its own output."""
    model = DiT(DiTConfig(image_size=4, patch_size=2, channels=2, dim=8, layers=1)).eval()
    image = torch.arange(32.0).view(1, 2, 4, 4)
    patches = image.unfold(2, 2, 2).unfold(3, 2, 2)  # [1, c, rows, columns, 2, 2]
    pixels = patches.permute(0, 2, 3, 4, 5, 1).reshape(1, 4, 8)
    model.head.forward = lambda hidden: pixels
    assert torch.equal(model(image, torch.zeros(1).long(), torch.zeros(1).long()), image)


def test_it_depends_on_time_label_and_place():
    torch.manual_seed(0)
    model = DiT(DiTConfig(layers=1)).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.1)
    images, times, labels = torch.zeros(1, 1, 8, 8), torch.tensor([3]), torch.tensor([3])
    first = model(images, times, labels)
    assert not torch.allclose(first, model(images, times + 1, labels))
    assert not torch.allclose(first, model(images, times, labels + 1))
    patches = first.unfold(2, 2, 2).unfold(3, 2, 2).reshape(16, 4)
    assert len(patches.unique(dim=0)) == 16, "of an image that is alike everywhere"


def test_labels_are_dropped_in_training_only():
    torch.manual_seed(0)
    model = DiT(DiTConfig(label_dropout=0.5))
    seen = []
    model.labels.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    arguments = torch.zeros(400, 1, 8, 8), torch.zeros(400).long(), torch.zeros(400).long()
    model(*arguments)
    model.eval()(*arguments)
    assert 150 < (seen[0] == 10).sum() < 250
    assert not seen[1].any()


def test_noise_comes_in_step_by_step():
    schedule = NoiseSchedule(100)
    assert schedule.signal.shape == (100,)
    assert (schedule.signal.diff() < 0).all()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(20_000, 1, generator=generator)
    images = torch.full((20_000, 1), 0.5)
    for time in (0, 30, 99):
        found = schedule.add_noise(images, noise, torch.full((20_000,), time))
        kept = schedule.signal[time].item()
        assert found.mean().item() == pytest.approx(0.5 * kept**0.5, abs=0.02)
        assert found.var().item() == pytest.approx(1 - kept, abs=0.03)


@pytest.mark.parametrize("steps", [1, 7, 50])
def test_who_knows_the_noise_finds_the_image(steps):
    schedule, labels, seen = NoiseSchedule(50), torch.arange(5), []

    def images(labels):
        return labels.float().unsqueeze(1).expand(-1, 3) / 10 - 0.5

    def perfect(noisy, times, labels):
        seen.append(int(times[0]))
        kept = schedule.signal[times].view(-1, 1)
        return (noisy - kept.sqrt() * images(labels)) / (1 - kept).sqrt()

    found = schedule.sample(perfect, labels, (3,), steps=steps)
    torch.testing.assert_close(found, images(labels), atol=1e-3, rtol=0)
    assert (len(seen), seen[0]) == (steps, 49)
    assert seen == sorted(seen, reverse=True)
    # Guidance goes away from no label: where both predictions, extrapolated, say the image is.
    found = schedule.sample(perfect, labels[4:] + 3, (3,), steps=50, guidance=1.5, no_label=5)
    torch.testing.assert_close(found, torch.full((1, 3), 0.3), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("kind", "config"), [(DiT, DiTConfig()), (VisionTransformer, ViTConfig(dropout=0.1))]
)
def test_from_the_meta_device(kind, config):
    wanted = kind(config)
    with torch.device("meta"):
        model = kind(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(torch.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(one.isfinite().all() for one in model.parameters())
    if kind is DiT:
        assert torch.equal(model.positions, wanted.positions)
        assert not model.head.weight.any()
    else:
        assert model.class_token.std() < 0.03


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ViTConfig(patch_size=3), r"patch_size=3\); expected a patch_size that divides"),
        (lambda: ViTConfig(dim=30), "dim=30, heads=4"),
        (lambda: ViTConfig(layers=0), "layers=0"),
        (
            lambda: VisionTransformer(ViTConfig())(torch.zeros(2, 1, 9, 9)),
            r"\(2, 1, 9, 9\); expected \(batch, 1, 8, 8\)",
        ),
        (lambda: DiTConfig(dim=66, heads=3), "expected a multiple of 4"),
        (lambda: NoiseSchedule(1), "at least 2 steps"),
        (lambda: NoiseSchedule(10).sample(None, None, (1,), steps=11), "expected 1 to 10"),
        (lambda: NoiseSchedule().sample(None, None, (1,), guidance=2.0), "without no_label"),
        (lambda: MLP((3,)), "at least two widths"),
        (lambda: MLP((3, 0)), "at least two widths"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ModelError, match=words):
        make()


SIZES = {"image_size": 32, "patch_size": 4, "channels": 3, "dim": 96, "layers": 3, "heads": 4}


def block(tokens, dim):
    """Multiply-adds of a block, forward: q, k, v, out, two of four times the width; attention."""
    return tokens * (12 * dim**2 + 2 * tokens * dim)


def test_operations_are_those_of_the_hand_formulas():
    """Backward is twice forward, but that the first layer's inputs have no gradient."""
    images, patches = torch.empty(5, 3, 32, 32), 64
    first = patches * 48 * 96
    blocks = 3 * block(patches + 1, 96)
    whole = count_flops(VisionTransformer(ViTConfig(**SIZES)), images)
    assert whole == 5 * 2 * (3 * (blocks + 96 * 10) + 2 * first)
    # By sample: the condition of each block and of the end, and what the time becomes.
    steered = 3 * 6 * 96**2 + 2 * 96**2 + 96**2
    blocks = 3 * block(patches, 96) + patches * 96 * 48
    condition = torch.zeros(5).long(), torch.zeros(5).long()
    whole = count_flops(DiT(DiTConfig(**SIZES)), images, *condition)
    assert whole == 5 * 2 * (3 * (blocks + steered) + 2 * (first + 256 * 96))
