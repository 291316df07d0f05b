"""The vision transformer learns the digits, and is built from the meta device; the perceptron."""

import pytest
import torch

from ezpz.data import digits
from ezpz.models import MLP, ModelError, VisionTransformer, ViTConfig


def test_it_learns_the_digits():
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    model = VisionTransformer(ViTConfig(dim=32, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = digits("train").tensors
    for start in [*range(0, 1438, 16)] * 3:
        part = slice(start, start + 16)
        loss = torch.nn.functional.cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    images, labels = digits("test").tensors
    assert (model.eval()(images).argmax(1) == labels).float().mean() > 0.7


def test_patches_are_the_image_cut_up():
    model = VisionTransformer(ViTConfig(image_size=8, patch_size=4, channels=2, dim=16))
    image = torch.arange(128.0).view(1, 2, 8, 8)
    tokens = model.patches(image)
    assert tokens.shape == (1, 4, 16)
    projection = model.patches.projection
    corner = (image[:, :, :4, 4:] * projection.weight).sum((1, 2, 3)) + projection.bias
    torch.testing.assert_close(tokens[0, 1], corner)


def test_from_the_meta_device():
    with torch.device("meta"):
        model = VisionTransformer(ViTConfig(dropout=0.1))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(torch.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(one.isfinite().all() for one in model.parameters())
    assert model.class_token.std() < 0.03


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"patch_size": 3}, r"image_size=8, patch_size=3\); expected a patch_size that divides"),
        ({"dim": 30}, r"dim=30, heads=4"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ModelError, match=words):
        ViTConfig(**sizes)


def test_other_images_are_refused():
    with pytest.raises(ModelError, match=r"\(2, 1, 9, 9\); expected \(batch, 1, 8, 8\)"):
        VisionTransformer(ViTConfig())(torch.zeros(2, 1, 9, 9))


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


@pytest.mark.parametrize("widths", [(), (3,), (3, 0)])
def test_widths_that_make_no_layer_are_refused(widths):
    with pytest.raises(ModelError, match="at least two widths"):
        MLP(widths)
