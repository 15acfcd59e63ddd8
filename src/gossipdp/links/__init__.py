"""Bytes between two workers.

link           the seam: Link, LinkHandler and Transport with their guarantees; Dialer; SendLimit,
               a limit on the bytes that all links of a worker send
handshake      a worker's identity, and the proof that opens a link
frames         the frames of an open link, and the part of a worker that each belongs to
tcp            the transport: one poll loop that owns all sockets
opening        a connection that is no link yet
tcp_link       one link: frames in and out of a stream
sockets, tls   the stream beneath: in the clear, or through TLS with the run's key; no forked child
               keeps a descriptor of ours
shared_memory  memory that a peer on the same host reads in place, and the way it is found
clock          seconds since boot
"""
