"""Mistakes in the call of ``gossipdp run``, each told before a process starts."""

from pathlib import Path

import pytest

from gossipdp.cli.main import main
from gossipdp.cli.run import RunArguments, _common_variables, _join_line
from gossipdp.launcher import team

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("GOSSIPDP_SECRET", raising=False)
    for name in (*TOLD, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in (("secret", "hush" * 4), ("short", "hush")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(1)")
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", r"-n \(--workers\) is missing; say how many workers to start"),
        ("-n 0", "-n is 0; start at least one worker"),
        ("-n 2 --max-restarts -1", "--max-restarts is -1; it must be 0 or more"),
        ("-n 2 --nnodes 2", "several hosts need one --rendezvous HOST:PORT"),
        ("-n 2 --nnodes 2 --rendezvous here", "--rendezvous is 'here'; write HOST:PORT"),
        ("-n 2 --nnodes 2 --rendezvous a:1 --port 5", "--port is for one host"),
        ("-n 2 --node-rank 1", "--node-rank without --nnodes"),
        (
            "-n 2 --nnodes 2 --node-rank 2 --rendezvous 127.0.0.1:1",
            r"--node-rank is 2; with --nnodes 2 it must be in 0\.\.1",
        ),
        ("-n 2 --nnodes 0 --rendezvous 127.0.0.1:1", "--nnodes is 0; it must be at least 1"),
        ("--join a:1", "--join needs the run's secret: give --secret-file"),
        ("--join a:1 --nnodes 2", "--join needs none of --nnodes, --node-rank, --rendezvous and"),
        ("-n 2 --secret-file nowhere", "--secret-file nowhere cannot be read: No such file"),
        ("-n 2 --secret-file .", r"--secret-file \. cannot be read: Is a directory"),
        ("--join a --secret-file DIR/secret", "--join is 'a'; write HOST:PORT"),
        ("-n 2 --secret-file DIR/short", "short has 4 bytes; give at least 16"),
        ("-n 2 --tls DIR", "cannot read tls_cert"),
        ("-n 2 --tls DIR --tls-key DIR/key.pem", "--tls names the certificate and its key: give"),
        (
            "-n 2 --nnodes 2 --rendezvous 203.0.113.7:1",
            "several hosts need a secret: whoever reaches 203.0.113.7:1 could take part",
        ),
    ],
)
def test_a_mistake_is_one_line(
    options: str, message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options.replace("DIR", str(Path(script).parent)).split()
    assert main(["run", *words, script]) == 2
    with pytest.raises(ValueError, match=rf"^gossipdp: error: .*{message}.*\n$"):
        raise ValueError(capsys.readouterr().err)


def test_nobody_to_join_is_one_line(
    script: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(address: tuple[str, int], *others: object) -> str:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(team, "_ask", ask)
    secret = str(Path(script).parent / "secret")
    words = ["--join", "10.0.0.1:1,[::1]:2", "--secret-file", secret]
    assert main(["run", *words, script]) == 2
    assert capsys.readouterr().err == (
        "gossipdp: error: no worker to join answers (10.0.0.1:1: [Errno 111] Connection refused; "
        "[::1]:2: [Errno 111] Connection refused); check that the run still goes on and that the "
        "address is one of its workers'\n"
    )


def test_the_line_on_joining_names_all_that_a_joiner_needs() -> None:
    tls = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem"), "tls_ca": Path("ca.pem")}
    arguments = RunArguments(
        workers=2, secret_file=Path("secret"), log_dir=Path("runs/mine"), **tls
    )
    assert _join_line(arguments, ("10.0.0.1", 4)) == (
        "to add a worker: gossipdp run --join 10.0.0.1:4 --secret-file secret "
        "--tls-cert cert.pem --tls-key key.pem --tls-ca ca.pem --log-dir runs/mine SCRIPT"
    )


@pytest.mark.parametrize("option", ["--nnodes", "--node-rank", "--port"])
def test_what_the_launcher_says_is_not_to_be_said_again(
    script: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    assert main(["run", option, "2", script]) == 2
    assert "need -n" in capsys.readouterr().err


def test_the_cores_are_shared_with_the_launchers_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in (TOLD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "100000"}).items():
        monkeypatch.setenv(name, value)
    assert _common_variables(RunArguments()) == {"OMP_NUM_THREADS": "1"}
