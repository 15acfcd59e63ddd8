"""TLS of links: the files that are refused at the start, and peers that are refused later."""

import dataclasses
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from links import Relay

from gossipdp.launcher.environment import Environment
from gossipdp.links import tls as tls_module
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.tls import Tls, TlsFiles, TlsStream, check_private, make_tls_files, tls_files

# The files.


def test_a_certificate_is_its_own_authority_unless_there_is_another(tmp_path: Path) -> None:
    cert, key, ca = (tmp_path / f"{name}.pem" for name in ("cert", "key", "ca"))
    assert tls_files(tmp_path) == TlsFiles(cert, key, cert)
    ca.touch()
    assert tls_files(str(tmp_path)) == TlsFiles(cert, key, ca)


def test_the_pair_of_a_run_is_made_once_and_only_its_owner_reads_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_tls_files(tmp_path / "new" / "tls")
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert files.cert.parent.stat().st_mode & 0o777 == 0o700
    Tls(files)
    assert not caplog.records
    before = files.key.read_bytes(), files.cert.read_bytes()
    for removed in (None, files.cert):
        if removed is not None:
            removed.unlink()
        with pytest.raises(FileExistsError):
            make_tls_files(files.cert.parent)
    assert files.key.read_bytes() == before[0]


def test_no_key_is_written_through_a_link_that_lies_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "key.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        make_tls_files(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_secret_file_that_others_may_read_is_warned_of(
    tmp_path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.touch()
    path.chmod(mode)
    check_private("--secret-file", path)
    assert ("others than you may read --secret-file" in caplog.text) == warns


def test_a_key_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_tls_files(tmp_path)
    files.key.chmod(0o644)
    Tls(files)
    assert "others than you may read the key" in caplog.text
    assert "mode 644" in caplog.text


def test_launchers_hand_them_on_by_variables(authority: Any) -> None:
    files = authority.issue()
    assert Environment.read({"GOSSIPDP_TLS": str(files.cert.parent)}).tls == files
    assert Environment.read({}).tls is None


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_file_that_is_missing_or_no_pem_is_named(
    authority: Any, tmp_path: Path, name: str
) -> None:
    files = authority.issue()
    missing = tmp_path / "missing.pem"
    with pytest.raises(ValueError, match=r"cannot read .*missing\.pem: No such file"):
        Tls(dataclasses.replace(files, **{name: missing}))
    for number, content in enumerate((b"\x30\x82\xff", b"", b"not a certificate")):
        path = tmp_path / f"other-{number}.pem"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"other-{number}\.pem"):
            Tls(dataclasses.replace(files, **{name: path}))


def test_a_key_of_another_certificate(authority: Any) -> None:
    first, second = authority.issue(), authority.issue()
    with pytest.raises(ValueError, match="the key is not that of the certificate"):
        Tls(dataclasses.replace(first, key=second.key))


def test_an_encrypted_key_asks_nobody(authority: Any, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    files = authority.issue()
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"hush"),
        )
    )
    with pytest.raises(ValueError, match="is encrypted, and workers cannot ask"):
        Tls(dataclasses.replace(files, key=locked))


@pytest.mark.parametrize(
    ("days", "fault"), [((-10, -1), "has expired"), ((1, 10), "not yet valid")]
)
def test_an_own_certificate_out_of_its_time(
    authority: Any, days: tuple[int, int], fault: str
) -> None:
    with pytest.raises(ValueError, match=f"{fault}; every other worker would refuse it"):
        Tls(authority.issue(*days))


def test_an_own_certificate_of_another_authority(authority: Any, new_authority: Any) -> None:
    other = new_authority("a stranger of the same run")
    files = dataclasses.replace(authority.issue(), ca=other.ca)
    with pytest.raises(ValueError, match="is of no use with the authority"):
        Tls(files)


def test_a_certificate_about_to_expire_is_warned_of(
    authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Tls(authority.issue())
    assert not caplog.records
    Tls(authority.issue(-1, 0.25))
    assert "expires in 6.0 hours" in caplog.text or "expires in 5.9 hours" in caplog.text


def test_a_chain_in_one_file_and_only_the_newest_tls(authority: Any, tmp_path: Path) -> None:
    files = authority.issue()
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files.cert.read_bytes() + files.ca.read_bytes())
    tls = Tls(dataclasses.replace(files, cert=chain))
    for context in (tls._client, tls._server):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert tls._server.num_tickets == 0


# Peers.


def test_an_answer_that_comes_while_the_hello_is_said(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_plain_worker_and_one_with_tls_say_so_once(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for dialler, acceptor in ((world.tls(0), world.tcp(1)), (world.tcp(2), world.tls(3))):
        caplog.clear()
        for _ in range(3):
            dialler.dial(acceptor)
            world.until(lambda dialler=dialler: dialler.handler.events)
            ((peer, refusal),) = dialler.handler.of("refused")
            dialler.handler.events.clear()
            assert peer == acceptor.rank
            assert refusal.field == "tls"
            assert "give all workers the same TLS directory, or none" in str(refusal)
        assert acceptor.handler.events == []
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        assert "refused 127.0.0.1: TLS differs" in messages[0]
        assert f"rank {acceptor.rank} at 127.0.0.1" in messages[1]


@pytest.fixture
def make_bad(
    authority: Any, new_authority: Any, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Callable[[str], tuple[Tls, Tls]]:
    """The TLS of a good worker, and of one that does not know what is wrong with its own."""

    def make(fault: str) -> tuple[Tls, Tls]:
        good = Tls(authority.issue())
        if fault == "expired":
            monkeypatch.setattr(Tls, "_meet_oneself", lambda self, files: float("inf"))
            return good, Tls(authority.issue(-10, -1))
        tls = Tls(new_authority(request.node.name).issue())
        # It trusts the run's authority, so that its own certificate alone is at fault.
        for context in (tls._client, tls._server):
            context.load_verify_locations(authority.ca)
        return good, tls

    return make


@pytest.mark.parametrize("dials", [True, False])
@pytest.mark.parametrize("fault", ["expired", "authority"])
def test_a_certificate_that_is_refused(
    world: Any, make_bad: Any, caplog: pytest.LogCaptureFixture, fault: str, dials: bool
) -> None:
    good, bad = (world.tls(rank, tls=tls) for rank, tls in enumerate(make_bad(fault)))
    dialler, acceptor = (bad, good) if dials else (good, bad)
    for _ in range(3):
        dialler.handler.events.clear()
        dialler.dial(acceptor)
        world.until(lambda: dialler.handler.events)
        assert dialler.handler.events == [
            ("dial_failed", acceptor.rank, (acceptor.host, acceptor.port), False)
        ]
        world.settle(turns=5)
    assert acceptor.handler.events == []
    reason = {
        "expired": "certificate has expired",
        "authority": "it is not this run's, nor signed by",
    }
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert sum(f"certificate refused: {reason[fault]}" in message for message in messages) == 1
    assert sum("the other end refused this worker's certificate" in m for m in messages) == 1


def test_holding_the_key_is_membership_and_the_secret_is_not_asked_for(world: Any) -> None:
    first, second = world.tls(0, secret=b"one"), world.tls(1, secret=b"another")
    world.join(first, second)


def test_workers_of_an_own_authority_have_a_certificate_each(world: Any, authority: Any) -> None:
    first, second = (world.tls(rank, tls=Tls(authority.issue())) for rank in range(2))
    world.join(first, second)


def test_the_certificate_of_another_run_opens_nothing(
    world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = world.tls(0), world.tls(1, tls=Tls(make_tls_files(tmp_path)))
    for dialler, acceptor in ((ours, other), (other, ours)):
        dialler.dial(acceptor)
        world.until(lambda dialler=dialler: dialler.handler.events)
        assert dialler.handler.names() == ["dial_failed"]
    assert not ours.handler.links
    assert "certificate refused" in caplog.text


def test_a_link_is_made_anew_before_its_key_has_protected_too_much(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "MAX_RECORDS", 10)
    first, second = world.tls(0), world.tls(1)
    payload = memoryview(bytes(50_000))
    longest = 0
    for number in range(16):
        if not first.handler.links:
            world.join(first, second)
        there = first.link(second)
        there.send_chunk(FrameType.STATE_CHUNK, ChunkKey(0, 0, 0, number), payload)
        world.until(lambda there=there: there.closed or not there.queued_chunks, first)
        longest = max(longest, there.bytes_sent)
        world.settle(turns=5)
    assert len(second.handler.of("chunk")) == 16  # it ends between two frames
    assert len(first.handler.of("link_up")) > 4
    assert {reason for _, reason in first.handler.of("link_down")} == {
        "its TLS key has protected as much as one may; a new link takes its place"
    }
    assert longest < 10 * tls_module.RECORD_BYTES + 2 * len(payload)


def test_a_link_that_never_runs_out_of_chunks_is_made_anew_too(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn ends between two of its frames: the socket is full at the end of each."""
    monkeypatch.setattr(tls_module, "MAX_RECORDS", 1000)
    first, second = world.tls(0), world.tls(1)
    there, _ = world.join(first, second)
    payload = memoryview(bytes(1 << 20))
    for number in range(100):
        there.send_chunk(FrameType.STATE_CHUNK, ChunkKey(0, 0, 0, number), payload)
    world.until(lambda: there.closed or not there.queued_chunks)
    assert there.closed
    assert there.bytes_sent < 1000 * tls_module.RECORD_BYTES + 2 * len(payload)


def test_a_link_that_the_peer_closed_says_so_where_writing_finds_it_first(world: Any) -> None:
    first, second = world.tls(0), world.tls(1)
    there, back = world.join(first, second)
    back.close("enough")
    world.settle(second)
    for _ in range(3):  # the kernel takes the first
        there.send_control(b"more")
        there.flush_controls()
    world.until(lambda: first.handler.of("link_down"))
    assert "closed by the peer" in first.handler.of("link_down")[0][1]


def test_nothing_of_tls_is_made_before_the_first_byte(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_cipher_text_that_was_changed_ends_the_link(world: Any) -> None:
    """What travelled before it still counts."""
    first, second = world.tls(0), world.tls(1)
    there, _ = world.join(first, second)
    there.send_control(b"good")
    first.transport.poll(0.0)
    socket.socket.send(there.connection, b"\x17\x03\x03\x00\x40" + bytes(64))
    world.until(lambda: second.handler.of("link_down"))
    assert second.handler.of("control")[0][1] == b"good"
    assert "connection lost" in second.handler.of("link_down")[0][1]
    assert "decryption failed" in second.handler.of("link_down")[0][1]


@pytest.mark.parametrize("end", ["farewell", "garbage"])
def test_an_end_in_the_middle_of_a_frame_is_noticed_at_once(world: Any, end: str) -> None:
    """TLS ends behind a piece of a frame, the connection does not: no event will follow."""
    first, second = world.tls(0), world.tls(1)
    there, back = world.join(first, second)
    world.settle(turns=3)
    there.stream.send([b"GDP1"])
    if end == "farewell":
        with pytest.raises(ssl.SSLWantReadError):
            there.connection.unwrap()
    else:
        socket.socket.send(there.connection, b"\x17\x03\x03\x00\x40" + bytes(64))
    world.until(lambda: back.closed, second)
    assert second.handler.of("link_down")[0][1] == (
        "closed by the peer"
        if end == "farewell"
        else "connection lost: decryption failed or bad record mac"
    )


def test_the_wire_shows_nothing_of_a_message(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that crosses it are TLS records."""
    first, second = world.tls(0), world.tls(1)
    relay = Relay(first, second)
    world.until(relay.turn)
    message = b"the parameters of the model"
    first.link(second).send_control(message)
    chunk = memoryview(b"weights!" * 1000)
    first.link(second).send_chunk(FrameType.STATE_CHUNK, ChunkKey(0, 0, 0, 0), chunk)
    world.until(lambda: relay.turn() and second.handler.of("chunk"))
    relay.close()
    assert second.handler.of("control")[0][1] == message
    for wire in relay.said:
        assert wire[:2] == b"\x16\x03"
        for secret in (message, b"weights!", b"GDPH", b"GDP1", b"ring of 4"):
            assert secret not in wire


def test_openssl_s_own_client_and_an_older_tls_are_refused(
    world: Any, run_tls: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """A client of TLS 1.2 with a good certificate, and one of TLS 1.3 without any."""
    node, files = world.tls(0), run_tls
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (old, bare):
        context.check_hostname = False
        context.load_verify_locations(files.ca)
    old.load_cert_chain(files.cert, files.key)
    for context in (old, bare):
        connection = socket.create_connection((node.host, node.port))
        connection.setblocking(False)
        client = context.wrap_socket(connection, do_handshake_on_connect=False)

        def turned_away(client: ssl.SSLSocket = client) -> bool:
            try:
                client.do_handshake()
                return client.recv(1) == b""
            except ssl.SSLWantReadError:
                return False
            except (ssl.SSLError, ConnectionError):
                return True

        world.until(turned_away)
        client.close()
    assert node.handler.events == []
    assert "unsupported protocol" in caplog.text


def test_tls_is_named_where_the_kernel_reports_an_error() -> None:
    assert tls_module.explain(ConnectionResetError(104, "Connection reset by peer")) == (
        "Connection reset by peer"
    )
