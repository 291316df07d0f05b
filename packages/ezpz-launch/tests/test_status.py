from ezpz_launch._status import Status, make_status_file


def test_reports_in_the_order_in_which_they_come(tmp_path):
    path = make_status_file(str(tmp_path))
    status = Status(path)
    with open(path, "a") as file:
        file.write("start 0 10\nstart 1 11\nend 1 7\nend 0")
        file.flush()
        status.update()
        assert status.pids == {0: 10}
        assert status.first_failure == (1, 7)
        file.write(" 3\n")
    status.update()
    assert status.pids == {}
    assert list(status.ended.items()) == [(1, 7), (0, 3)]
    assert status.first_failure == (1, 7)


def test_nobody_else_can_read_it(tmp_path):
    path = tmp_path / make_status_file(str(tmp_path))
    assert path.stat().st_mode & 0o777 == 0o600
