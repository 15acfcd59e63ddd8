"""Mistakes in a call: exit status 2 and words that say what to do, before anything starts."""

import shlex

import pytest

from gossipdp.cli.main import main

# Mistakes in the words themselves: tyro's box names the option, and the help to call.
WORDS = [
    ("", "Expected one of {run, plan,", "gossipdp --help"),
    ("bogus", "Unrecognized options: bogus", "Available subcommands: run, plan, top, tls-init"),
    ("plan 3 --bogus 1", "Unrecognized options: 3", "gossipdp plan --help"),
    ("run --nodes 2", "Perhaps you meant:", "--nnodes INT"),
    ("tls-init", "Missing from gossipdp tls-init", "gossipdp tls-init --help"),
    ("demo --method a2cid", "invalid choice 'a2cid' for argument '--method'", "'a2cid2'"),
    ("train", "Expected one of {cifar10, imagenet, fashion-mnist, bytes-gpt}", "--help"),
    # values that the class of the options refuses
    ("train cifar10 --epochs 0", "--epochs is 0; it must be at least 1", "--help"),
    ("train bytes-gpt --width 100", "--width 100 is not a multiple of --heads 8", "--help"),
    ("train bytes-gpt --resume --method allreduce", "--resume has no effect with", "--help"),
]


@pytest.mark.parametrize(("words", "what", "instead"), WORDS)
def test_a_mistake_in_the_words_is_named(words, what, instead, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    text = " ".join(shown.err.replace("│", " ").split())
    assert what in text
    assert instead in text
    assert shown.out == ""


MISTAKES = [
    ("plan --json nowhere/x.json", "--json nowhere/x.json: the directory to write it to does"),
    ("plan --workers 4 --json .", "--json . cannot be written"),
    ("report nowhere", "there is no directory nowhere; give the run's log_dir"),
    ("report .", ". holds no log of a worker"),
    ("top here", "the address is 'here'; write HOST:PORT"),
    ("top ''", "no address; write HOST:PORT"),
    ("top --interval 0", "--interval is 0.0; it must be a number of at least 0.1"),
    # run
    ("run train.py -n 2", "-n is missing: say how many workers to start. Options come before"),
    ("run -n 0 train.py", "--workers is 0; it must be at least 1"),
    ("run -n 2", "no script to run; write it after the options"),
    ("run -n 2 nothing.py", "no such script: nothing.py"),
    ("run -n 2 --host 203.0.113.1 train.py", "cannot listen on 203.0.113.1:0"),
    ("run -n 3 --nproc-per-replica 2 train.py", "-n is 3; it counts processes"),
    ("run --nproc-per-replica 2 train.py", "--nproc-per-replica needs -n"),
    ("run -n 2 --nnodes 2 train.py", "several hosts need one --rendezvous HOST:PORT"),
    ("run -n 2 --node-rank 1 train.py", "--node-rank without --nnodes"),
    (
        "run -n 2 --nnodes 2 --node-rank 2 --rendezvous 127.0.0.1:1 train.py",
        "--node-rank is 2; with --nnodes 2 it must be in 0..1",
    ),
    ("run -n 2 --nnodes 2 --rendezvous 203.0.113.7:1 train.py", "several hosts need a secret"),
    ("run --join a:1 train.py", "a run that was started without cannot be joined"),
    ("run --join a:1 --nnodes 2 train.py", "--join needs none of --nnodes, --node-rank"),
    ("run --join a --secret-file secret train.py", "--join is 'a'; write HOST:PORT"),
    (
        "run --join 127.0.0.1:1,[::1]:2 --secret-file secret train.py",
        "no worker to join answers (127.0.0.1:1: [Errno 111] Connection refused; [::1]:2: ",
    ),
    ("run -n 2 --secret-file nowhere train.py", "--secret-file nowhere cannot be read: No such"),
    ("run -n 2 --secret-file short train.py", "short has 4 bytes; give at least 16"),
    ("run -n 2 --status-port 65536 train.py", "--status-port is 65536; it must be in 0..65535"),
    ("run -n 4 --nproc-per-replica 2 --faults 'kill 2' train.py", "no rank 2 among 2 workers"),
    ("run -n 2 --tls . train.py", "cert.pem: No such file or directory; gossipdp tls-init DIR"),
    # plan
    ("plan", "pass --workers"),
    ("plan --graph ring --workers 4 --comm-rate 1e300", "comm rate 1e+300 is not a positive"),
    # demo
    ("demo --faults 'slow 2'", "--faults: 'slow 2': say how many times slower: 4x"),
    ("demo --faults 'kill 0 at 5s' --method allreduce", "--method allreduce"),
    ("demo --compare --workload digits", "--compare does not go with --workload"),
    ("demo --seconds 9 --samples 99", "--samples and --seconds both say when the run ends"),
    ("demo --compare --method allreduce", "choose a2cid2 or gossip"),
    ("demo --compare --workers 1", "--workers 2 or more"),
    ("demo --restart", "--restart, which starts killed workers again: --faults"),
    # train
    ("train bytes-gpt --device tpu", "--device is 'tpu'; choose cpu or cuda"),
    ("train bytes-gpt --max-restarts 1 --method allreduce", "where a death ends the run: leave it"),
    ("train cifar10 --data .", "data_batch_1.bin. CIFAR-10 is not downloaded for you"),
    ("train fashion-mnist --data .", "install Debian's package dataset-fashion-mnist, or name"),
    ("train imagenet --data .", "ImageNet is not downloaded for you: register at"),
    ("train bytes-gpt --data edges", "holds 9 bytes of text"),
    ("train bytes-gpt --data train.py --batch-size 9999", "are less than one batch of"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_in_the_call_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("secret", "hush" * 4), ("short", "hush"), ("train.py", "pass\n" * 4000)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "edges").write_text("0 1\n1 2\n")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr("gossipdp.launcher.local.start_fork_server", lambda **_: None)
    monkeypatch.setattr(
        "gossipdp.launcher.local.launch", lambda *_, **__: pytest.fail("a worker was started")
    )
    assert main(shlex.split(words)) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("gossipdp: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert set(tmp_path.iterdir()) == before
