"""Under another launcher: torchrun with one supervised worker a process; the Job's manifest."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from run_processes import path_before, run_python

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
SUPPORT = Path(__file__).parents[1] / "support"

# Worker 1 takes part and dies, in each of its lives; worker 0 trains until that has happened.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from small_run import SmallRun

run = SmallRun(graph="complete")
marks, train_until, stats = Path(sys.argv[1]), run.train_until, run.model.stats

train_until(lambda: stats().exchanges_initiated + stats().exchanges_answered >= 2)
(marks / f"{run.rank}.{run.life}").touch()
train_until((marks / "0.0").exists)
if run.rank == 1:
    train_until((marks / "1.0").exists)
    os.kill(os.getpid(), signal.SIGKILL)
train_until((marks / "1.1").exists)
done = run.model.consolidate()
local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
print("done", run.rank, run.life, *local, done.world_size)
"""


@pytest.mark.processes
def test_under_torchrun_a_death_stays_one_death(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    supervised = ["-m", "gossipdp", "run", "--max-restarts", "1", str(script), str(tmp_path)]
    done = run_python(*torchrun, *supervised, environment=path_before(SUPPORT))
    # Torchrun has ended nobody, and hears of the worker that is lost when the other has ended.
    assert done.stdout == "done 0 0 0 2 1\n", done.stderr
    killed = "gossipdp: worker 1 died of signal 9 (SIGKILL)"
    assert "gossipdp: worker 1 is started again (restarts left: 0)" in done.stderr
    assert f"{killed}; the others go on" in done.stderr
    assert done.returncode == 1
    assert "exitcode  : 1" in done.stderr


def test_the_manifest_has_the_form_of_its_kinds_and_mounts_the_directory_that_it_names_for_tls():
    documents = list(yaml.safe_load_all((CLUSTERS / "kubernetes_job.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for version in ("1.30", "1.33"):
        for document in documents:
            kubernetes_validate.validate(document, version, strict=True)
    pod = documents[1]["spec"]["template"]["spec"]
    (worker,), (volume,) = pod["containers"], pod["volumes"]
    command = worker["command"]
    mount = {"name": volume["name"], "mountPath": command[command.index("--tls") + 1]}
    assert worker["volumeMounts"] == [{**mount, "readOnly": True}]
    assert volume["secret"]["defaultMode"] == 0o400
