"""What a training step needs around the layers: loss, data, random streams, gradients."""
