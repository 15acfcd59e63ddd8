"""Bytes between two workers.

link           the seam: Link, LinkHandler and Transport, and what they guarantee
handshake      who a worker is, and the proof that opens a link
frames         what travels on an open link
tcp            the transport: one poll loop that owns all sockets
openings       connections that are not links yet; which of two crossing dials stays
tcp_link       one link: frames in and out of a stream
sockets, tls   the stream beneath: in the clear, or through TLS with the run's key
shared_memory  chunks that a peer on the same host reads in place
shared_offers  how that memory is passed
dialer         when to dial whom
fork           a forked child keeps none of our descriptors
clock, strangers   seconds since boot; bounded warnings and text that is safe to show
"""
