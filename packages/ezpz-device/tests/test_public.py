import ezpz_device


def test_all_is_what_is_there():
    for name in ezpz_device.__all__:
        assert getattr(ezpz_device, name) is not None
    assert {"get_torch_device", "Memory"} < set(ezpz_device.__all__) <= set(dir(ezpz_device))
