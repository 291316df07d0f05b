"""Real ranks, forked where what the suite imports is loaded."""

import pytest
from forked_ranks import clean_env, fork_server, ranks, user_env


@pytest.fixture(scope="session")
def prelude():
    return "import ezpz_dist, ezpz_tp\n"


@pytest.fixture(scope="session")
def preloaded():
    return [
        "ezpz_dist", "ezpz_tp",
        # What some tests import on each rank, for seconds.
        "ezpz._test.rank", "ezpz.models._llama", "ezpz.models._llama_pipeline", "fire", "numpy",
        "plotext", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim",
        "torch.distributed.pipelining",
    ]  # fmt: skip
