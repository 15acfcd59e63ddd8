"""TLS of links: the files that are refused at the start, and peers that are refused later."""

import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from links import key

from gossipdp.links import tls as tls_module
from gossipdp.links.frames import FrameType
from gossipdp.links.tls import Tls, TlsStream, make_tls_files

GARBAGE = "decryption failed or bad record mac"
if ssl.OPENSSL_VERSION_INFO >= (3, 2):
    GARBAGE = "record layer failure"


def with_other(directory: Path, name: str, content: bytes | None, folder: Path) -> Path:
    """Return a copy of the files in which one has other content; None: it is not there."""
    copy = shutil.copytree(directory, folder / "copy")
    (copy / f"{name}.pem").unlink(missing_ok=True)
    if content is not None:
        (copy / f"{name}.pem").write_bytes(content)
    return copy


def test_the_pair_of_a_run_is_made_once_and_only_its_owner_reads_the_key(tmp_path, caplog):
    directory = tmp_path / "new" / "tls"
    make_tls_files(directory)
    cert, private = directory / "cert.pem", directory / "key.pem"
    assert [each.stat().st_mode & 0o777 for each in (private, directory)] == [0o600, 0o700]
    Tls(directory)
    assert not caplog.records
    private.chmod(0o640)
    Tls(directory)
    assert "others than you may read the key" in caplog.text
    before = private.read_bytes()
    for removed in (None, cert):
        if removed is not None:
            removed.unlink()
        with pytest.raises(FileExistsError):
            make_tls_files(directory)
    assert private.read_bytes() == before
    (tmp_path / "key.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        make_tls_files(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture(scope="module")
def other_authority(new_authority: Any) -> Any:
    return new_authority("a stranger's")


def locked(private: bytes) -> bytes:
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = serialization.BestAvailableEncryption(b"hush")
    return serialization.load_pem_private_key(private, None).private_bytes(pem, form, secret)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("cert", None, r"cannot read .*cert\.pem: No such file"),
        ("key", b"\x30\x82\xff", r"key\.pem is no PEM file"),
        ("ca", b"no certificate", r"ca\.pem.*PEM"),
        ("key", lambda own, other: other, "the key is not that of the cert"),
        ("key", lambda own, other: locked(own), "is encrypted, and workers"),
        ("ca", lambda own, other: other, r"is of no use with the authority .*ca\.pem"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    authority, other_authority, tmp_path, *, name, content, fault
):
    directories = authority.issue(), other_authority.issue()
    if callable(content):
        content = content(*((each / f"{name}.pem").read_bytes() for each in directories))
    with pytest.raises(ValueError, match=fault):
        Tls(with_other(directories[0], name, content, tmp_path))


@pytest.mark.parametrize("days", [(-10, -1), (1, 10)], ids=["expired", "not yet valid"])
def test_neither_dates_of_certificates_nor_secrets_are_looked_at(world, authority, days):
    """A run may outlive its certificate, and clocks step: links are made anew all the while."""
    one, other = (Tls(authority.issue(*days)) for _ in range(2))
    world.join(world.tls(0, tls=one, secret=b"one"), world.tls(1, tls=other, secret=b"another"))


def test_a_chain_in_one_file_and_only_the_newest_tls(authority, tmp_path):
    directory = authority.issue()
    chain = (directory / "cert.pem").read_bytes() + (directory / "ca.pem").read_bytes()
    tls = Tls(with_other(directory, "cert", chain, tmp_path))
    for context in (tls._client, tls._server):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert tls._server.num_tickets == 0


def test_an_answer_that_comes_while_the_hello_is_said(world, monkeypatch):
    """The acceptor, elsewhere, is so fast that the dialler's first call ends its handshake."""
    dialler, acceptor = world.tls(0), world.tls(1)
    real = TlsStream.do_handshake

    def eager(stream: TlsStream) -> None:
        for _ in range(5):
            try:
                real(stream)
                return
            except BlockingIOError:
                if not stream.connection.server_side:
                    acceptor.transport.poll(0.0)
        raise BlockingIOError

    monkeypatch.setattr(TlsStream, "do_handshake", eager)
    world.join(dialler, acceptor)


def test_a_plain_worker_and_one_with_tls_say_so_once(world, caplog):
    off_on = (world.tls(0), world.tcp(1), "off", "on")
    on_off = (world.tcp(2), world.tls(3), "on", "off")
    for dialler, acceptor, there, here in (off_on, on_off):
        caplog.clear()
        for _ in range(2):
            dialler.dial(acceptor)
            world.until(lambda dialler=dialler: dialler.handler.events)
            ((peer, refusal),) = dialler.handler.of("refused")
            dialler.handler.events.clear()
            assert (peer, refusal.field) == (acceptor.rank, "tls")
            text = f"TLS is {there} at the other worker and {here} here; give all workers the same"
            assert str(refusal) == f"{text} TLS directory, or none"
        assert acceptor.handler.events == []
        differs = f"TLS differs (ours {there!r}, theirs {here!r})"
        at = f"rank {acceptor.rank} at {acceptor.host}:{acceptor.port}"
        assert caplog.messages == [f"refused 127.0.0.1: {differs}", f"{at} refuses: {refusal}"]


@pytest.mark.parametrize("dials", [True, False])
def test_a_certificate_that_is_refused(
    world, authority, other_authority, *, monkeypatch, caplog, dials
):
    # The bad one does not know what is wrong with its certificate, and trusts the run's authority.
    monkeypatch.setattr(Tls, "_meet_oneself", lambda self: None)
    directory = other_authority.issue()
    (directory / "ca.pem").write_bytes(authority.ca.read_bytes())
    good, bad = world.tls(0, tls=Tls(authority.issue())), world.tls(1, tls=Tls(directory))
    dialler, acceptor = (bad, good) if dials else (good, bad)
    for _ in range(2):
        dialler.handler.events.clear()
        dialler.dial(acceptor)
        world.until(lambda: dialler.handler.events)
        failed = ("dial_failed", acceptor.rank, (acceptor.host, acceptor.port), False)
        assert dialler.handler.events == [failed]
        world.settle(turns=5)
    assert acceptor.handler.events == []
    one, other = sorted(message.partition(": ")[2] for message in caplog.messages)
    assert one.startswith("certificate refused: it is not this run's, nor signed by")
    assert other.startswith("the other end refused this worker's certificate")


def test_a_link_is_made_anew_before_its_key_has_protected_too_much(world, monkeypatch):
    monkeypatch.setattr(tls_module, "MAX_RECORDS", 10)
    first, second = world.tls(0), world.tls(1)
    payload = memoryview(bytes(50_000))
    longest, is_due = 0, False
    for number in range(16):
        if not first.handler.links:
            world.join(first, second)
        there = first.link(second)
        there.send_chunk(FrameType.STATE_CHUNK, key(number), payload)
        world.until(lambda there=there: there.closed or not there.queued_chunks, first)
        longest = max(longest, there.bytes_sent)
        is_due |= there.is_aging and not there.closed
        world.settle(turns=5)
    assert len(second.handler.of("chunk")) == 16  # it ends between two frames
    assert len(first.handler.of("link_up")) > 4
    assert {reason for _, reason in first.handler.of("link_down")} == {
        "its TLS key has protected as much as one may; a new link takes its place"
    }
    assert longest < 10 * tls_module.RECORD_BYTES + 2 * len(payload)
    assert is_due, "half way a new link is due, which may wait"


def test_a_link_that_never_runs_out_of_chunks_is_made_anew_too(world, monkeypatch):
    """No turn ends between two of its frames: the socket is full at the end of each."""
    monkeypatch.setattr(tls_module, "MAX_RECORDS", 1000)
    _, _, there, _ = world.pair(world.tls)
    payload = memoryview(bytes(1 << 20))
    for number in range(100):
        there.send_chunk(FrameType.STATE_CHUNK, key(number), payload)
    world.until(lambda: there.closed or not there.queued_chunks)
    assert there.closed
    assert there.bytes_sent < 1000 * tls_module.RECORD_BYTES + 2 * len(payload)


def test_a_link_that_the_peer_closed_says_so_where_writing_finds_it_first(world):
    first, second, there, back = world.pair(world.tls)
    back.close("enough")
    world.settle(second)
    for _ in range(3):  # the kernel takes the first
        there.send_control(b"more")
        there.flush_controls()
    world.until(lambda: first.handler.of("link_down"))
    assert "closed by the peer" in first.handler.of("link_down")[0][1]


def test_nothing_of_tls_is_made_before_the_first_byte(world, monkeypatch):
    node = world.tls(0)
    made: list[bool] = []
    real = Tls.wrap
    monkeypatch.setattr(Tls, "wrap", lambda *args, **kind: made.append(True) or real(*args, **kind))
    guest = socket.create_connection((node.host, node.port))
    world.settle(turns=5)
    assert made == []
    guest.sendall(b"G")  # may be the start of our own handshake
    world.settle(turns=5)
    assert made == []
    guest.sendall(b"ET / HTTP")
    world.until(lambda: made)
    guest.close()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("farewell", "closed by the peer"),
        ("garbage", f"connection lost: {GARBAGE}"),
    ],
)
def test_an_end_in_the_middle_of_a_frame_is_noticed_at_once(world, end, reason):
    """TLS ends behind a piece of a frame, the connection does not: no event will follow."""
    first, second, there, back = world.pair(world.tls)
    world.settle(turns=3)
    there.send_control(b"good")
    first.transport.poll(0.0)
    there.stream.send([b"GDP1"])
    if end == "farewell":
        with pytest.raises(ssl.SSLWantReadError):
            there.connection.unwrap()
    else:
        socket.socket.send(there.connection, b"\x17\x03\x03\x00\x40" + bytes(64))
    world.until(lambda: back.closed, second)
    assert second.handler.of("control") == [(back, b"good")], "what came before it still counts"
    assert second.handler.of("link_down")[0][1] == reason
