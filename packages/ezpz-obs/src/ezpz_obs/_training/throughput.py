"""How much a step got done: tokens, samples and floating-point operations a second."""

from __future__ import annotations

import logging
import sys

from ezpz_obs._context import find_place

logger = logging.getLogger("ezpz_obs")


class Throughput:
    """Rates of a training run, from the seconds of its steps.

    What a step is of (tokens, samples, operations) is counted over the whole job: all ranks, all
    micro-batches.

    >>> rates = Throughput(tokens_per_step=4096, flops_per_token=6e9, peak_flops=312e12)
    >>> rates.metrics(0.25)
    {'tokens_per_s': 16384.0, 'tflops': 98.304, 'mfu': 0.3150769230769231}

    Args:
        tokens_per_step: Tokens of one step.
        samples_per_step: Samples of one step.
        flops_per_token: Floating-point operations that the model needs for one token, forward and
            backward: see `transformer_flops`.
        flops_per_step: The same of one step, instead.
        peak_flops: FLOP/s of one device at best; default: what ezpz_device knows of this one, or
            ``EZPZ_PEAK_FLOPS``. Without it there is no ``mfu``, and a warning says so, once.
        dtype: What the matrix products are of, for the default of ``peak_flops``: "bf16", "fp16",
            "fp32", "tf32", "fp8".
        world_size: Devices that share the work; default: the job's ranks.

    Raises:
        ValueError: A count is no number above 0, or ``flops_per_token`` has no tokens.
    """

    def __init__(
        self,
        *,
        tokens_per_step: float | None = None,
        samples_per_step: float | None = None,
        flops_per_token: float | None = None,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        dtype: str = "bf16",
        world_size: int | None = None,
    ) -> None:
        given = {
            "tokens_per_step": tokens_per_step, "samples_per_step": samples_per_step,
            "flops_per_token": flops_per_token, "flops_per_step": flops_per_step,
            "peak_flops": peak_flops, "world_size": world_size,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}; expected a number above 0")
        if flops_per_token is not None and flops_per_step is not None:
            raise ValueError("flops_per_token and flops_per_step; expected one of them")
        self._tokens, self._samples = tokens_per_step, samples_per_step
        self._flops_per_token, self._flops = flops_per_token, flops_per_step
        self._dtype = dtype
        self._peak = peak_flops
        self._is_peak_known = peak_flops is not None
        self._world_size = world_size

    def metrics(
        self,
        seconds: float | None,
        *,
        tokens: float | None = None,
        samples: float | None = None,
    ) -> dict[str, float]:
        """Return the rates of one step.

        Args:
            seconds: The step's time, as of `StepTimer.seconds`; None: nothing is known yet.
            tokens: Of this step, over the whole job, where steps differ.
            samples: Of this step likewise.

        Returns:
            ``tokens_per_s`` and ``samples_per_s`` of the whole job; ``tflops``, 10^12 operations a
            second of one device; ``mfu``, the model FLOPs utilization (of the PaLM paper): what
            part that is of the device's peak. What cannot be known is not there.

        Raises:
            ValueError: ``seconds`` is no number above 0, or there are operations a token and no
                tokens.
        """
        if seconds is None:
            return {}
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds={seconds}; expected the time of a step, above 0")
        tokens = self._tokens if tokens is None else tokens
        samples = self._samples if samples is None else samples
        found: dict[str, float] = {}
        if tokens is not None:
            found["tokens_per_s"] = tokens / seconds
        if samples is not None:
            found["samples_per_s"] = samples / seconds
        flops = self._flops
        if self._flops_per_token is not None:
            if tokens is None:
                raise ValueError("flops_per_token without tokens; give tokens_per_step or tokens")
            flops = self._flops_per_token * tokens
        if flops is not None:
            rate = flops / seconds / self._devices()
            found["tflops"] = rate / 1e12
            peak = self._peak if self._is_peak_known else self._find_peak()
            if peak is not None:
                found["mfu"] = rate / peak
        return found

    def _devices(self) -> int:
        if self._world_size is None:
            self._world_size = find_place().world_size
        return self._world_size

    def _find_peak(self) -> float | None:
        """Look the device's peak up, once; say what is missing where there is none."""
        self._is_peak_known = True
        remedy = "give peak_flops"
        if "torch" not in sys.modules:
            missing = "torch is not imported, so there is no device"
        else:
            try:
                # torch is imported already; ezpz_device is an extra.
                from ezpz_device import get_device_properties, get_peak_flops
            except ModuleNotFoundError:
                missing = "ezpz_device is not installed"
                remedy = "pip install 'ezpz-obs[device]', or give peak_flops"
            else:
                self._peak = get_peak_flops(self._dtype)
                if self._peak is not None:
                    return self._peak
                name = get_device_properties()["name"]
                missing = f"no peak of {self._dtype} is known for {name!r}"
                remedy = "set EZPZ_PEAK_FLOPS, or give peak_flops (FLOP/s of one device)"
        logger.warning("no mfu: %s; %s", missing, remedy)
        return None


def transformer_flops(parameters: int, layers: int, hidden: int, sequence: int) -> int:
    """Return the floating-point operations of a transformer for one token, forward and backward.

    ``6 N + 12 L D T``: two operations a parameter forward and four backward, and the attention's
    scores and sums over T positions (no discount for a causal mask). Operations that activation
    checkpointing repeats do not count: the model does not need them. As in appendix B of the
    PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311).

    >>> transformer_flops(parameters=7_000_000_000, layers=32, hidden=4096, sequence=4096)
    48442450944

    Args:
        parameters: N, of the whole model; of a mixture of experts those that a token meets.
        layers: L.
        hidden: D, heads times the size of a head.
        sequence: T, tokens of a sequence.
    """
    return 6 * parameters + 12 * layers * hidden * sequence
