"""Bytes between two workers.

link           the seam: Link, LinkHandler and Transport, and what they guarantee; when to dial whom
handshake      who a worker is, and the proof that opens a link
frames         what travels on an open link
tcp            the transport: one poll loop that owns all sockets
opening        a connection that is no link yet
tcp_link       one link: frames in and out of a stream
sockets, tls   the stream beneath: in the clear, or through TLS with the run's key; no forked child
               keeps a descriptor of ours
shared_memory  chunks that a peer on the same host reads in place, and how that memory is passed
clock          seconds since boot
"""
