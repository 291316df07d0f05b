"""Megatron-LM's vocabulary-parallel cross entropy: `ezpz_tp`'s own.

Label smoothing is torch's, with the mean over the whole vocabulary; Megatron-LM's takes the mean
over each rank's part, so that its loss differs between ranks.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py, 2026-08-22.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ezpz_tp._cross_entropy import vocab_parallel_cross_entropy

__all__ = ["VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"]


class VocabParallelCrossEntropy:
    """The steps of Megatron-LM's cross entropy, for code that fuses them and sends in between.

    None changes what it is given, as Megatron-LM's do with the logits and the saved softmax.
    Shapes: logits ``[..., V/tp]``, and n tokens, or ``[...]``, of everything else.
    """

    @staticmethod
    def calculate_logits_max(vocab_parallel_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits in float32, and their maximum on this rank."""
        logits = vocab_parallel_logits.float()
        return logits, logits.amax(-1)

    @staticmethod
    def calculate_predicted_logits(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        logits_max: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what the ranks sum, given the maximum over all of them.

        Returns:
            Whether a target is another rank's; its column here, or 0, ``[n]``; its logit here, or
            0; the sum of the exponentials; the exponentials.
        """
        shifted = vocab_parallel_logits - logits_max.unsqueeze(-1)
        foreign = (target < vocab_start_index) | (target >= vocab_end_index)
        column = (target - vocab_start_index).masked_fill(foreign, 0)
        predicted = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        exponentials = shifted.exp()
        return foreign, column.view(-1), predicted, exponentials.sum(-1), exponentials

    @staticmethod
    def calculate_cross_entropy_loss(
        exp_logits: Tensor, predicted_logits: Tensor, sum_exp_logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the softmax and the loss, given the sums over the ranks."""
        loss = sum_exp_logits.log() - predicted_logits
        return exp_logits / sum_exp_logits.unsqueeze(-1), loss

    @staticmethod
    def prepare_gradient_calculation_operands(
        softmax: Tensor, target_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradient as ``[n, V/tp]``, its rows, what to subtract there, and itself."""
        gradient = softmax.clone()
        flat = gradient.view(-1, softmax.shape[-1])
        rows = torch.arange(flat.shape[0], device=flat.device)
        return flat, rows, 1.0 - target_mask.view(-1).float(), gradient

    @staticmethod
    def calculate_gradients(
        grad_2d: Tensor,
        arange_1d: Tensor,
        masked_target_1d: Tensor,
        softmax_update: Tensor,
        grad_input: Tensor,
        grad_output: Tensor,
    ) -> Tensor:
        """Return the gradient of the logits, of `prepare_gradient_calculation_operands`."""
        grad_2d[arange_1d, masked_target_1d] -= softmax_update
        return grad_input.mul_(grad_output.unsqueeze(-1))
