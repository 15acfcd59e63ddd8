"""Mistakes in the call of ``gossipdp run``, each told before a process starts."""

from pathlib import Path

import pytest

from gossipdp.cli.main import main
from gossipdp.cli.run import RunArguments, _JoinLine
from gossipdp.runtime import run_id_query


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("GOSSIPDP_SECRET", raising=False)
    (tmp_path / "secret").write_text("hush")
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
            "-n 2 --nnodes 2 --node-rank 2 --rendezvous a:1",
            r"--node-rank is 2; with --nnodes 2 it must be in 0\.\.1",
        ),
        ("-n 2 --nnodes 0 --rendezvous a:1", "--nnodes is 0; it must be at least 1"),
        ("--join a:1", "--join needs the run's secret: give --secret-file"),
        ("--join a:1 --nnodes 2", "--join needs none of --nnodes, --node-rank, --rendezvous and"),
        ("-n 2 --secret-file nowhere", "--secret-file nowhere cannot be read: No such file"),
        ("-n 2 --secret-file .", r"--secret-file \. cannot be read: Is a directory"),
        ("--join a --secret-file FILE", "--join is 'a'; write HOST:PORT"),
    ],
)
def test_a_mistake_is_one_line(
    options: str, message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options.replace("FILE", str(Path(script).parent / "secret")).split()
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

    monkeypatch.setattr(run_id_query, "_ask", ask)
    secret = str(Path(script).parent / "secret")
    words = ["--join", "10.0.0.1:1,[::1]:2", "--secret-file", secret]
    assert main(["run", *words, script]) == 2
    assert capsys.readouterr().err == (
        "gossipdp: error: no worker to join answers (10.0.0.1:1: [Errno 111] Connection refused; "
        "[::1]:2: [Errno 111] Connection refused); check that the run still goes on and that the "
        "address is one of its workers'\n"
    )


def test_the_line_on_joining_names_all_that_a_joiner_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush")
    tls = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem"), "tls_ca": Path("ca.pem")}
    line = _JoinLine(RunArguments(workers=2, secret_file=secret, log_dir=Path("runs/mine"), **tls))
    line({})
    line({1: ("10.0.0.2", 5), 0: ("10.0.0.1", 4)})
    line({0: ("10.0.0.1", 4)})
    assert capsys.readouterr().err == (
        f"gossipdp: to add a worker: gossipdp run --join 10.0.0.1:4 --secret-file {secret} "
        "--tls-cert cert.pem --tls-key key.pem --tls-ca ca.pem --log-dir runs/mine SCRIPT\n"
    )
