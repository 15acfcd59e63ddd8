"""Which link stays when two workers have, or are about to have, two.

Where both dial at the same time, the link dialled by the lower rank stays. A link counts as
established at the acceptor before it does at the dialler, and a dialler names the last link that
it had with the acceptor and let go. So the acceptor alone decides, and both ends come to the same:

- A link dialled by the lower rank always replaces the old one.
- A link dialled by the higher rank replaces one dialled by the lower only if the dialler had that
  very link and let it go; else the two crossed on the way, and the old one stays. (If the acceptor
  holds the old link, the dialler held it once too: it was established there first.)
- The higher rank gives up its own dial once a link that the lower dialled is up; the lower turns
  the higher's dial away while its own has got through to the same place.
- Another life of the peer, a higher incarnation or another process, always replaces; a lower
  incarnation never does.
"""

from gossipdp.runtime.handshake import Handshake
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.link import Link


def same_life(old: Identity, new: Identity) -> bool:
    """Whether both hellos come from the same process."""
    return (old.incarnation, old.process_id) == (new.incarnation, new.process_id)


def acceptor_keeps(
    old: Link, old_dialler: int, old_link_id: bytes, handshake: Handshake, mine: int
) -> bool:
    """Whether the acceptor of a new link, of rank ``mine``, keeps the old one instead."""
    peer = handshake.peer
    assert peer is not None
    return (
        old_dialler == mine < peer.rank
        and same_life(old.peer_identity, peer)
        and old_link_id != handshake.peer_last_link
    )
