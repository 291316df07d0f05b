import pytest

pytestmark = pytest.mark.parametrize("n", [1, 2])


def test_set_up_twice_clean_up_and_again(ranks, n):
    ranks(
        n,
        """
        n = int(os.environ.get("WORLD_SIZE", 1))
        rank = setup_torch(seed=3, timeout=60)
        assert rank == int(os.environ.get("RANK", 0)) == dist.get_rank()
        assert dist.get_world_size() == n
        assert setup_torch(seed=3, timeout=60) == rank
        try:
            setup_torch(seed=4, timeout=60)
        except SetupError as error:
            assert "call cleanup() in between" in str(error)
        else:
            raise AssertionError("other arguments were accepted")
        cleanup()
        cleanup()
        assert not dist.is_initialized()
        assert setup_torch(seed=4, timeout=60) == rank
        cleanup()
        """,
    )


def test_torchruns_variables_are_exported_in_a_world_of_several(ranks, n):
    script = """
        before = dict(os.environ)
        setup_torch(timeout=60)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
                 "MASTER_ADDR", "MASTER_PORT")
        print({name: os.environ.get(name) for name in names})
        cleanup()
        assert dict(os.environ) == before
        """
    for rank, text in enumerate(ranks(n, script)):
        seen = eval(text)  # what we printed ourselves
        if n == 1:
            assert set(seen.values()) == {None}
        else:
            assert (seen["RANK"], seen["WORLD_SIZE"], seen["GROUP_RANK"]) == (str(rank), "2", "0")


def test_a_group_that_somebody_else_made(ranks, n):
    ranks(
        n,
        """
        rank, n = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        store = dist.HashStore() if n == 1 else None
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        try:
            setup_torch()
        except SetupError as error:
            assert "a process group exists already" in str(error)
        else:
            raise AssertionError("a second group was made")
        dist.destroy_process_group()
        """,
    )


def test_many_set_ups_with_a_model_that_outlives_the_group(ranks, n):
    # torch's gloo destructor can wait for the GIL for ever (see _setup._retired), and a
    # store that a model still holds keeps the keys of the group before.
    ranks(
        n,
        """
        import faulthandler
        kept = None
        for i in range(60):
            faulthandler.dump_traceback_later(20, exit=True)
            setup_torch(timeout=15)
            model = wrap_model(torch.nn.Linear(4, 4))
            model(torch.rand(2, 4)).sum().backward()
            all_reduce(1)
            cleanup()
            kept = model if i % 2 else kept
        faulthandler.cancel_dump_traceback_later()
        """,
    )


def test_a_backend_that_is_not_there(ranks, n):
    ranks(
        n,
        """
        try:
            setup_torch(backend="smoke")
        except SetupError as error:
            assert "'smoke' is not in this torch" in str(error)
        else:
            raise AssertionError("accepted")
        """,
    )


def test_the_nodes_cores_are_shared_among_its_ranks(ranks, n):
    script = """
        os.environ.pop("OMP_NUM_THREADS", None)
        os.cpu_count = lambda: 6
        ezpz_dist._group.get_cpu_count = lambda: int(os.environ["TEST_AFFINITY"])
        torch.set_num_threads(5)
        setup_torch(timeout=60)
        print(torch.get_num_threads())
        cleanup()
        """
    free = ranks(n, script, env={"TEST_AFFINITY": "6"})
    bound = ranks(n, script, env={"TEST_AFFINITY": "3"})
    assert [int(text) for text in free] == ([5] if n == 1 else [3, 3])
    # a launcher that bound this rank to its cores has shared them already
    assert [int(text) for text in bound] == [5] * n
