"""TLS 1.3 around a stream socket: the same calls as on a plain one, with certificates of both sides
when there is a CA.

    files      who proves what
    cert, key  what this node shows, as listener and as connector: PEM, the key without a password
    ca         given: both sides must show a certificate that it signed (mTLS), and their names
               become the peer's identity
               "": the channel is encrypted, and who is at its other end is told by the handshake
               inside, which is bound to this channel (channel_binding): whoever stands in the
               middle of two channels cannot pass its proofs on

Names are not compared with addresses: a job's CA signs for the job, and its nodes live at any
address. So `ca` is the job's own, never a public one. No version but 1.3, no resumption and no
early data: nothing to fall back to, nothing to replay.

Certificates end, and are renewed while nodes run: the files are looked at before each handshake,
and loaded again when one of them is another. Connections that are open keep what they began with.
Files that do not fit together (they are replaced one after the other) are named in the log once,
and those loaded before go on.

Why an SSLSocket that does not block, and not an SSLObject with two MemoryBIOs: 40 MB over loopback
went at 0.5 to 0.77 GB/s with the first and at 0.44 to 0.5 GB/s with the second, whose every byte is
copied twice more (2 cores, OpenSSL 3.0, 16 KiB records, where the plain socket did 1.5). What it
costs: OpenSSL does not say how much of a write it took when it wants the socket to be writable, and
expects the very same bytes again. So bytes are offered in pieces of PIECE_BYTES, and a piece counts
when all of it is gone; TcpConnection keeps what did not go, ahead of all else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import stat
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from shard.errors import AuthenticationError, RemoteProtocolError, ShardError, UnreachableError
from shard.loop.readiness import until_ready
from shard.transport.handshake import TLS_ALERT

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

logger = logging.getLogger("shard")

KEY_MODE_FORBIDDEN = 0o037  # what others may do with a key, and a group but read it
# of plain text in one TLS record, at most (RFC 8446, 5.1): what one read gives
RECORD_BYTES = 16 << 10
# Of one write: four records, some 100 us. Reading waits for as long, because OpenSSL bears one
# thread at a time.
PIECE_BYTES = 64 << 10

_BOTH_OR_NONE = "switch TLS on at both sides (PRPC_TLS_CERT, PRPC_TLS_KEY, PRPC_TLS_CA), or at none"
_NO_HANDSHAKE = f"it hung up during the TLS handshake: it may not speak TLS; {_BOTH_OR_NONE}"
# What we tell a plain peer, which looks for TLS_ALERT (handshake.py): fatal, "protocol_version"
# (RFC 8446, 6).
ALERT_RECORD = TLS_ALERT + b"\x03\x00\x02\x02\x46"
NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
# What OpenSSL calls it -> what it means, and what to do. All of these are settled by whoever runs
# the nodes.
_MEANING = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "the peer showed no certificate; give it one with PRPC_TLS_CERT and PRPC_TLS_KEY"
    ),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": (
        "the peer wants a certificate of ours; set PRPC_TLS_CERT and PRPC_TLS_KEY here"
    ),
    "TLSV1_ALERT_UNKNOWN_CA": (
        "the peer does not know the CA of our certificate; both sides need the same PRPC_TLS_CA"
    ),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": (
        "the peer says that our certificate has expired; make a new one, or mend a clock"
    ),
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer refuses our certificate (not valid yet, or broken); "
    "make a new one, "
    "or mend a clock",
    "TLSV1_ALERT_DECRYPT_ERROR": (
        "the peer refuses our certificate: its signature is not that of the CA"
    ),
    "UNSUPPORTED_PROTOCOL": "the peer offers no TLS 1.3, and nothing older is taken",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer takes no TLS 1.3, and nothing older is offered",
    "WRONG_VERSION_NUMBER": f"the peer does not speak TLS; {_BOTH_OR_NONE}",
    "HTTP_REQUEST": "the peer does not speak TLS but HTTP",
}


class TlsFiles(Protocol):
    """TLS files are paths of PEM files: what this node shows its peers, and which CA theirs are of.

    Given by whoever makes a Tls, which looks at the files before each handshake and loads them
    again when they were replaced. Who proves what by which file: the table at the file's head.
    """

    @property
    def cert(self) -> str:
        """The certificate, then those between it and the CA."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def ca(self) -> str:
        """The job's CA, or ""."""


class TlsSocket(ssl.SSLSocket):
    """A socket with TLS on it. Like a plain one, it raises BlockingIOError where it would have to
    wait, answers b"" or 0 when the peer said goodbye, and ConnectionResetError when it vanished.
    Owned like a plain one, by its Greeting or TcpConnection."""

    # the reactor's thread reads while others send, and OpenSSL bears one at a time
    turn: threading.Lock
    has_more: bool  # decrypted and not yet read: epoll does not tell of it

    def __new__(cls, *args: Any, **kwargs: Any) -> TlsSocket:
        """Here, because SSLContext.wrap_socket() makes it, and reads from it when the peer is gone
        already.
        """
        made = super().__new__(cls, *args, **kwargs)
        # an SSL object is for one thread at a time: one may send while another reads
        made.turn, made.has_more = threading.Lock(), False
        return made

    def shake(self) -> int:
        """One step of the handshake: 0 when it is done, else the event of epoll that the next step
        waits for.

        Raises AuthenticationError, RemoteProtocolError, OSError."""
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        except ConnectionError as error:
            raise ConnectionResetError(_NO_HANDSHAKE) from error
        except ssl.SSLError as error:
            if _is_cut(error):
                raise ConnectionResetError(_NO_HANDSHAKE) from error
            if error.reason in NOT_TLS:  # OpenSSL leaves such a peer without an answer
                with contextlib.suppress(OSError):
                    os.write(self.fileno(), ALERT_RECORD)
            raise explain(error) from error
        return 0

    def binding(self) -> bytes:
        """What only the two ends of this channel know, the same at both.

        The connector's Finished message: in TLS 1.3 a MAC over the whole handshake, keyed by it.
        Raises AuthenticationError where there is none: a proof that is bound to nothing could be
        passed on."""
        value = self.get_channel_binding("tls-unique")
        if not value:
            raise AuthenticationError(
                "this TLS channel has nothing to bind the proof of the secret to"
            )
        return value

    def subjects(self) -> tuple[str, ...]:
        """The names in the peer's certificate; () when no CA vouches for it."""
        shown = self.getpeercert() or {}
        fields: Any = shown.get("subject", ())
        others: Any = shown.get("subjectAltName", ())
        common = [value for part in fields for name, value in part if name == "commonName"]
        return (*common, *(value for kind, value in others if kind in ("DNS", "URI")))

    # -- as on a plain socket ----------------------------------------------------------------------

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """While two sides meet: also raises AuthenticationError, as the peer's verdict on our
        certificate arrives here.
        """
        with self.turn:
            try:
                return super().recv(buflen, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError(error.errno, "no whole record yet") from error
            except ssl.SSLError as error:
                if _is_cut(error):
                    raise ConnectionResetError("it hung up without a TLS goodbye") from error
                raise explain(error) from error

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Also raises RemoteProtocolError for a record that is not as the peer sealed it."""
        with self.turn:
            try:
                count = super().recv_into(buffer, nbytes, flags)
                self.has_more = self.pending() > 0
                return count
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                self.has_more = False
                raise BlockingIOError(error.errno, "no whole record yet") from error
            except ssl.SSLError as error:
                if _is_cut(error):
                    raise ConnectionResetError(
                        "it hung up without a TLS goodbye: it died, or somebody cut the stream"
                    ) from error
                raise RemoteProtocolError(f"TLS: {error.reason or error}") from error

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """A piece of `data`, or BlockingIOError:
        then the next call must begin with the same bytes.
        """
        with self.turn:
            try:
                return super().send(memoryview(data)[:PIECE_BYTES], flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError(error.errno, "no room for a whole piece") from error
            except ssl.SSLError as error:
                raise ConnectionResetError(f"TLS: {error.reason or error}") from error

    def send_parts(self, parts: Iterable[memoryview]) -> int:
        """As sendmsg() on a plain socket: a piece of what the parts come to. Small ones share a
        record.
        """
        piece = bytearray()
        for part in parts:
            if not piece and len(part) >= PIECE_BYTES:
                return self.send(part)
            piece += part[: PIECE_BYTES - len(piece)]
            if len(piece) == PIECE_BYTES:
                break
        return self.send(piece)

    def close(self) -> None:
        """Say goodbye, so that the peer can tell an end from a cut, and close; never waits."""
        with self.turn:  # to the very end: nobody may write to the socket between goodbye and close
            with contextlib.suppress(OSError, ValueError):
                self.setblocking(False)
                self.unwrap()
            super().close()


class Tls:
    """One node's certificate and CA, loaded: makes TLS sockets of plain ones. Owned by a
    TcpTransport.

    Raises ShardError for files that cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = _versions(files)  # of the files, when they were last loaded, or could not be
        self._accepting, self._connecting = _contexts(files)

    def _renew(self) -> None:
        """Load the files again if they have changed. From any thread: two that do so at once load
        the same.
        """
        versions = _versions(self._files)
        if versions == self._seen:
            return
        self._seen = versions
        try:
            self._accepting, self._connecting = _contexts(self._files)
        except ShardError as error:
            logger.warning("changed TLS files cannot be used, those loaded before stay: %s", error)
        else:
            logger.info(
                "TLS uses the changed files from now on: %s, %s, %s",
                self._files.cert,
                self._files.key,
                self._files.ca or "no CA",
            )

    def accept(self, sock: socket.socket) -> TlsSocket:
        """For a socket that was accepted and does not block; shake() comes next. Takes the socket
        over. Raises OSError.
        """
        self._renew()
        return self._wrap(self._accepting, sock, True)

    async def connect(self, sock: socket.socket, address: str, deadline: float) -> TlsSocket:
        """For a socket that has connected and does not block: shakes hands step by step, in a
        coroutine of the control loop, until time.monotonic() says `deadline`. Takes the socket
        over once it has begun, and closes it when it ends otherwise than by returning.

        Raises AuthenticationError, RemoteProtocolError, UnreachableError."""
        self._renew()
        try:
            tls = self._wrap(self._connecting, sock, False)
        except OSError as error:
            raise UnreachableError(
                f"{address} hung up before the TLS handshake: {error.strerror or error}"
            ) from error
        with contextlib.ExitStack() as closing:
            closing.callback(tls.close)
            try:
                while event := tls.shake():
                    await until_ready(tls, event, deadline)
            except TimeoutError as error:
                raise UnreachableError(
                    f"{address} did not finish the TLS handshake in time: it hangs, "
                    "or speaks no TLS"
                ) from error
            except OSError as error:
                raise UnreachableError(f"{address}: {error.strerror or error}") from error
            closing.pop_all()
        return tls

    @staticmethod
    def _wrap(context: ssl.SSLContext, sock: socket.socket, accepted: bool) -> TlsSocket:
        # raises for a peer that is gone: wrap_socket() would leave the socket open then
        sock.getpeername()
        tls = context.wrap_socket(
            sock, server_side=accepted, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        assert isinstance(tls, TlsSocket)
        return tls


def _versions(files: TlsFiles) -> list[tuple[int, ...]]:
    """What is another when a file is: written in place, renamed over, or reached through another
    link.
    """
    found: list[tuple[int, ...]] = []
    for path in (files.cert, files.key, files.ca):
        try:
            status = os.stat(path)
            found.append(
                (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
            )
        except OSError:
            found.append(())
    return found


def _contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """As listener, as connector. Raises ShardError."""
    with contextlib.suppress(OSError):  # which loading it tells better
        mode = stat.S_IMODE(os.stat(files.key).st_mode)
        if mode & KEY_MODE_FORBIDDEN:
            raise ShardError(
                f"key {files.key!r} has mode {mode:04o}: others may read or change it; "
                f"chmod 600 {files.key}"
            )
    accepting = _context(ssl.PROTOCOL_TLS_SERVER, files)
    accepting.num_tickets = 0  # no resumption
    return accepting, _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # A stream that is cut is no end; it is one to Python 3.11.2, Debian's, with OpenSSL 3
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    context.check_hostname = False  # see the file's head
    context.verify_mode = ssl.CERT_REQUIRED if files.ca else ssl.CERT_NONE
    try:
        # else OpenSSL asks at the terminal
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except OSError as error:
        raise ShardError(
            f"certificate {files.cert!r} with key {files.key!r} cannot be used: {_reason(error)}; "
            "both in PEM, the key without a password and that of the certificate"
        ) from error
    try:
        if files.ca:
            context.load_verify_locations(files.ca)
    except OSError as error:
        raise ShardError(
            f"CA {files.ca!r} cannot be used: {_reason(error)}; certificates in PEM are expected"
        ) from error
    return context


def _is_cut(error: ssl.SSLError) -> bool:
    """The stream ended without a goodbye; Python 3.11.2 has no error of its own for that."""
    return isinstance(error, ssl.SSLEOFError) or error.reason == "UNEXPECTED_EOF_WHILE_READING"


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)


def explain(error: ssl.SSLError) -> AuthenticationError | RemoteProtocolError:
    """What went wrong between two sides that meet, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"its certificate is refused: {error.verify_message}; "
            "one that is valid now and signed by PRPC_TLS_CA is needed"
        )
    meaning = _MEANING.get(error.reason or "")
    return (
        AuthenticationError(meaning)
        if meaning
        else RemoteProtocolError(f"the TLS handshake failed: {error.reason or error}")
    )
