"""Each library's sink, read back by the library itself."""

import json
import math

import pytest

from ezpz_obs import History, replay

HOSTILE = "<script>\"'é$"
TRACKIO = """
import sys; from ezpz_obs import History
with History("run", sinks=["trackio"], resume=True) as history:
    for step in range(int(sys.argv[1]), int(sys.argv[2])):
        history.record({"loss": 1 / (step + 1), "big": 1 << 70})
"""


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    # What is sent is tested: on a busy machine an end may take longer.
    monkeypatch.setattr("ezpz_obs._sinks.CLOSE_SECONDS", 500.0)


def train(folder, sink, first=0, last=200, factor=1.0):
    with History(folder, sinks=[sink], config={"lr": 0.1}) as history:
        for step in range(first, last):
            history.record(
                {
                    "loss": factor / (step + 1), "nan": math.nan, "inf": -math.inf,
                    "train/flag": step % 2 == 0, "big": 1 << 70, "huge": 10**400, HOSTILE: 2,
                },
                step=step,
            )  # fmt: skip


class TestTensorboard:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("tensorboard")

    @staticmethod
    def scalars(folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return {
            tag: [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }

    def test_all_is_there_and_a_restarted_run_and_a_replay_replace_their_steps(
        self, tmp_path, warned
    ):
        train(tmp_path, "tensorboard")
        found = self.scalars(tmp_path)
        assert warned() == []
        assert [step for step, _ in found["loss"]] == list(range(200))
        assert found["loss"][9][1] == pytest.approx(0.1)
        assert math.isnan(found["nan"][0][1])
        assert found["inf"][0][1] == -math.inf
        assert [value for _, value in found["train/flag"][:2]] == [1.0, 0.0]
        assert found["big"][0][1] == 2.0**70
        assert found["huge"][0][1] == math.inf
        assert found[HOSTILE][5] == (5, 2.0)
        train(tmp_path, "tensorboard", first=150, last=220, factor=-1.0)
        loss = self.scalars(tmp_path)["loss"]
        assert [step for step, _ in loss] == list(range(220))
        assert loss[149][1] == pytest.approx(1 / 150)
        assert loss[150][1] == pytest.approx(-1 / 151)
        assert replay(tmp_path, "tensorboard") == 220
        assert self.scalars(tmp_path)["loss"] == loss


class TestMlflow:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    @staticmethod
    def runs(folder):
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
        numbers = [each.experiment_id for each in client.search_experiments()]
        return client, client.search_runs(numbers)

    @pytest.mark.filterwarnings("ignore")  # its own
    def test_all_is_there_a_restarted_run_is_the_same_and_a_replay_another(self, tmp_path, warned):
        train(tmp_path, "mlflow", last=60)
        train(tmp_path, "mlflow", first=50, last=70, factor=-1.0)
        assert warned() == []
        client, (run,) = self.runs(tmp_path)
        assert run.info.status == "FINISHED"
        assert run.info.run_name == tmp_path.name
        assert run.data.params["lr"] == "0.1"
        loss = client.get_metric_history(run.info.run_id, "loss")
        assert [point.step for point in loss] == [*range(60), *range(50, 70)]
        assert loss[9].value == 0.1
        assert math.isnan(run.data.metrics["nan"])
        assert run.data.metrics["inf"] == -math.inf
        assert run.data.metrics["big"] == 2.0**70
        (shown,) = (name for name in run.data.metrics if name.startswith("_script"))
        assert run.data.metrics[shown] == 2
        assert replay(tmp_path, "mlflow") == 70
        assert len(self.runs(tmp_path)[1]) == 2

    def test_one_that_is_set_up_is_beside_those_of_the_environment(self, tmp_path, python):
        script = """
            from ezpz_obs import History, setup_mlflow
            setup_mlflow("mine")
            setup_mlflow("mine")
            with History(".") as history:
                history.record({"loss": 1})
        """
        python(script, env={"EZPZ_TRACKER_BACKENDS": "csv"})
        client, (run,) = self.runs(tmp_path)
        assert client.get_experiment(run.info.experiment_id).name == "mine"
        assert (tmp_path / "metrics.csv").exists()

    def test_names_that_mlflow_does_not_take(self):
        from ezpz_obs._sinks.mlflow import to_mlflow_name

        names = ["loss", "a/b.c-d e:f", "a$", "a%", "x" * 300, "../../up", "/root", "a//b", "."]
        shown = [to_mlflow_name(name) for name in names]
        assert shown[:2] == names[:2]
        assert len(set(shown)) == len(names)
        assert all(len(name) <= 250 and ".." not in name for name in shown)
        assert not any(name.startswith("/") for name in shown)


class TestTrackio:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch, tmp_path):
        pytest.importorskip("trackio")
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))
        monkeypatch.setenv("TRACKIO_PROJECT", "tests")

    def test_all_is_there_and_a_restarted_run_is_the_same(self, python):
        # Processes of their own: trackio reads where its folder is when it is imported.
        for first, last in ((0, 60), (60, 70)):
            done = python(TRACKIO, first, last)
            assert "sink" not in done.stderr
        done = python(
            "import json; from trackio.sqlite_storage import SQLiteStorage as s; "
            "runs = s.get_runs('tests'); print(json.dumps([runs, s.get_logs('tests', runs[0])]))"
        )
        runs, logs = json.loads(done.stdout)
        assert len(runs) == 1
        assert [line["step"] for line in logs] == list(range(70))
        assert logs[9]["loss"] == 0.1
        assert logs[9]["big"] == 2.0**70
