"""Where else a run's records go: tables, TensorBoard, W&B, MLflow, trackio."""

from .feeder import Feeder, close_all
from .names import make_sinks
from .protocol import Sink
from .replay import replay
from .wandb_start import setup_wandb, verify_wandb

__all__ = ["Feeder", "Sink", "close_all", "make_sinks", "replay", "setup_wandb", "verify_wandb"]
